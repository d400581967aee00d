"""What tfbackend plans for a classifier, without an engine: ``python -m tests.serve.pooling.plans [PATTERN ...]``."""

import argparse
import fnmatch
import sys
import traceback
from typing import Any

from tests.serve.matrix.plans import one_line
from tests.serve.pooling.checkpoint import Case, architectures, tiny_config
from tests.serve.pooling.judge import TASKS


def plan_of(case: Case, longest: int = 128) -> tuple[Any, tuple[Any, ...]]:
    """(plan, refusals) of the tiny model of a case, as of an engine in which each call holds whole prompts."""
    import torch

    from tfbackend.meta import CLASSIFY, EMBED, build
    from tfbackend.plan import draft_plan
    from tfbackend.serving import ServingSpec

    config = tiny_config(case)
    config.architectures = [f"For{case.head}"] if case.head else ["Model"]
    built = build(config, torch.float32, task=CLASSIFY if case.head else EMBED)
    return draft_plan(built, ServingSpec(whole_prompts=True, max_model_len=longest))


def main(argv: list[str]) -> int:
    """Print a line for each; the exit status is 0 if planning none of them crashed."""
    from tfbackend.errors import TfbackendError

    parser = argparse.ArgumentParser(prog="python -m tests.serve.pooling.plans", description=__doc__)
    parser.add_argument("names", nargs="*", help="model types or patterns; all if none")
    parser.add_argument("--head", choices=TASKS, default="SequenceClassification")
    options = parser.parse_args(argv)
    names = architectures(options.head)
    crashed = 0
    for name in (n for n in names if not options.names or any(fnmatch.fnmatch(n, p) for p in options.names)):
        try:
            plan, refusals = plan_of(Case(name, options.head))
        except TfbackendError as error:
            print(f"{name:22} refused\n    - {one_line(error)[:500]}", flush=True)
            continue
        except Exception as error:  # noqa: BLE001 - whatever it is, the line says it
            last = traceback.extract_tb(error.__traceback__)[-1]
            crashed += 1
            print(f"{name:22} crashed {type(error).__name__}: {one_line(error)[:300]} {last.name}:{last.lineno}")
            continue
        print(f"{name:22} {'refused' if refusals else 'planned'} {plan.classifier or ''}", flush=True)
        for reason in dict.fromkeys(map(one_line, refusals)):
            print(f"    - {reason[:500]}", flush=True)
    return int(crashed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
