"""Runs the pooling matrix: ``python -m tests.serve.pooling [PATTERN ...] [--head HEAD] [--only failed]``.

Every model type that Transformers has a class with this head for, or those that match, tiny and random, each served by
a real engine beside Transformers' own class. ``--head ""`` compares the hidden states of each token of the base model.
Verdicts are kept in .cache/pooling.json as they come; ``python -m tests.serve.pooling.coverage`` makes a page of them.
"""

import argparse
import fnmatch
import sys

from tests.serve.engine import Harness
from tests.serve.matrix.results import BACKENDS
from tests.serve.pooling.checkpoint import Case, architectures
from tests.serve.pooling.judge import attempt
from tests.serve.pooling.results import HEADS, Store


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.serve.pooling", description=__doc__)
    parser.add_argument("names", nargs="*", help="model types or patterns; all if none")
    parser.add_argument("--head", choices=HEADS, action="append", help="default: SequenceClassification")
    parser.add_argument("--backend", choices=BACKENDS, default="ours")
    parser.add_argument("--only", choices=("failed", "new"), help="what was not equal, or not run, the last time")
    parser.add_argument("--compiled", action="store_true", help="with torch.compile; printed and not kept")
    return parser.parse_args(argv)


def _chosen(options: argparse.Namespace, store: Store) -> list[Case]:
    cases = []
    for head in options.head or ["SequenceClassification"]:
        for name in architectures(head):
            last = store.verdicts.get((name, head, options.backend))
            wanted = {"new": last is None, "failed": last is not None and last.verdict != "equal"}
            matches = not options.names or any(fnmatch.fnmatch(name, pattern) for pattern in options.names)
            if matches and wanted.get(options.only, True):
                cases.append(Case(name, head))
    return cases


def main(argv: list[str]) -> int:
    """Print a verdict for each; the exit status is 0 if none is wrong and none crashed."""
    options, store = _parse(argv), Store()
    harness, bad = Harness(), 0
    try:
        for case in _chosen(options, store):
            args = {"enforce_eager": not options.compiled}
            verdict = attempt(harness, case, options.backend, engine_args=args)
            bad += verdict.verdict in ("wrong", "crashed")
            print(f"{case.model_type:22} {case.head or 'hidden states':22} {verdict}", flush=True)
            if not options.compiled:
                store.put((case.model_type, case.head, options.backend), verdict)
    finally:
        harness.close()
    for head in options.head or ["SequenceClassification"]:
        counts = ", ".join(f"{count} {verdict}" for verdict, count in store.counts(head, options.backend).items())
        print(f"{head or 'hidden states'}: {counts}")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
