"""What tfbackend plans for an architecture, without an engine: ``python -m tests.serve.matrix.plans [PATTERN ...]``."""

import fnmatch
import re
import sys
import traceback
from dataclasses import dataclass
from typing import Any

from tests.serve.matrix.derive import tiny_config
from tests.serve.matrix.kinds import classify
from tests.serve.matrix.results import attempted


@dataclass(frozen=True)
class Planned:
    """The outcome of planning: "planned", "refused" or "crashed", every reason in one line, rewrites by fuser."""

    model_type: str
    kind: str
    outcome: str
    reasons: tuple[str, ...]
    counts: dict[str, int]
    misses: tuple[str, ...] = ()


def one_line(error: object) -> str:
    """An error's text without its line breaks, layers alike."""
    return re.sub(r"\.\d+(?=\.)", ".*", " ".join(str(error).split()))


def plan_one(model_type: str) -> Planned:
    """Plan the tiny model of an architecture; an error is an outcome, told with the place it came from."""
    import torch
    from transformers import AutoModelForCausalLM

    kind = "?"
    try:
        config = tiny_config(model_type)
        with torch.device("meta"):
            kind = classify(model_type, AutoModelForCausalLM.from_config(config))
        return _plan(model_type, kind, config)
    except Exception as error:  # noqa: BLE001 - whatever it is, the table says it
        from tfbackend.errors import TfbackendError

        outcome = "refused" if isinstance(error, TfbackendError) else "crashed"
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = "" if outcome == "refused" else f" ({last.filename.rsplit('/', 1)[-1]}:{last.lineno})"
        return Planned(model_type, kind, outcome, (f"{type(error).__name__}: {one_line(error)}{place}",), {})


def _plan(model_type: str, kind: str, config: Any) -> Planned:
    import torch

    from tfbackend.meta import build
    from tfbackend.plan import draft_plan
    from tfbackend.serving import ServingSpec

    plan, refusals = draft_plan(build(config, torch.float32), ServingSpec())
    reasons = tuple(dict.fromkeys(one_line(refusal) for refusal in refusals))
    misses = tuple(dict.fromkeys(f"{miss.fuser}: {miss.reason}" for miss in plan.misses))
    outcome = "refused" if refusals else "planned"
    return Planned(model_type, kind, outcome, reasons, dict(sorted(plan.counts.items())), misses)


def select(patterns: list[str]) -> list[str]:
    """The architectures and variants that match a pattern; all where there is none."""
    return [name for name in attempted() if not patterns or any(fnmatch.fnmatch(name, p) for p in patterns)]


def main(patterns: list[str]) -> int:
    """Print a line for each architecture; the exit status is 0 if none crashed."""
    from transformers import logging

    logging.set_verbosity_error()
    outcomes = []
    for name in select(patterns):
        planned = plan_one(name)
        outcomes.append(planned.outcome)
        counts = ", ".join(f"{count} {fuser}" for fuser, count in planned.counts.items())
        print(f"{name:26} {planned.kind:10} {planned.outcome:8} {counts}", flush=True)
        for reason in planned.reasons:
            print(f"    - {reason[:600]}", flush=True)
        for miss in planned.misses:
            print(f"    ~ {miss[:300]}", flush=True)
    print({outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))})
    return int("crashed" in outcomes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
