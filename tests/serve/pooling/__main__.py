"""Runs the pooling matrix: ``python -m tests.serve.pooling [PATTERN ...] [--head TokenClassification]``.

Every model type that Transformers has a classifier of texts for, or those that match, tiny and random, each served by a
real engine beside Transformers' own class. ``--head ""`` compares the hidden states of each token of the base model.
"""

import argparse
import fnmatch
import sys
from collections import Counter

from tests.serve.engine import Harness
from tests.serve.pooling.checkpoint import Case, architectures
from tests.serve.pooling.judge import TASKS, attempt


def main(argv: list[str]) -> int:
    """Print a verdict for each; the exit status is 0 if none is wrong and none crashed."""
    parser = argparse.ArgumentParser(prog="python -m tests.serve.pooling", description=__doc__)
    parser.add_argument("names", nargs="*", help="model types or patterns; all if none")
    parser.add_argument("--head", choices=TASKS, default="SequenceClassification")
    parser.add_argument("--compiled", action="store_true", help="with torch.compile")
    options = parser.parse_args(argv)
    names = [n for n in architectures() if not options.names or any(fnmatch.fnmatch(n, p) for p in options.names)]
    counts: Counter[str] = Counter()
    harness = Harness()
    try:
        for name in names:
            args = {"enforce_eager": not options.compiled}
            verdict = attempt(harness, Case(name, options.head), engine_args=args)
            counts[verdict.verdict] += 1
            print(f"{name:22} {verdict}", flush=True)
    finally:
        harness.close()
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()))
    return 1 if counts["wrong"] or counts["crashed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
