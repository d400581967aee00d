"""Runs the matrix: ``python -m tests.serve.matrix [PATTERN ...] [--only failed] [--kind dense] [--backend ours]``.

Results are kept in .cache/matrix.json as they come; the table at the end shows all that is known of what was chosen.
"""

import argparse
import fnmatch
import sys
import threading
from collections.abc import Iterator

from tests.serve.engine import ENGINE_TIMEOUT, Harness
from tests.serve.matrix.attempt import attempt, expect
from tests.serve.matrix.kinds import KINDS
from tests.serve.matrix.results import BACKENDS, VERDICTS, Result, Store, attempted
from tests.serve.matrix.table import print_table


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.serve.matrix", description=__doc__)
    parser.add_argument("names", nargs="*", help="model types or patterns (gpt2, 'gemma*'); all if none")
    parser.add_argument("--only", choices=("failed", "new", *VERDICTS), help="by our last verdict; failed: not equal")
    parser.add_argument("--kind", choices=KINDS, action="append", help="by the kind that the last run found")
    parser.add_argument("--backend", choices=BACKENDS, action="append", help="default: ours, then vLLM's own")
    parser.add_argument("--workers", type=int, default=1, help="engines at a time")
    parser.add_argument("--timeout", type=float, default=ENGINE_TIMEOUT, help="seconds for one engine")
    parser.add_argument("--compiled", action="store_true", help="ours with torch.compile; printed and not kept")
    parser.add_argument("--show", action="store_true", help="run nothing, print the table")
    return parser.parse_args(argv)


def _chosen(options: argparse.Namespace, store: Store) -> list[str]:
    backend = (options.backend or BACKENDS)[0]
    names = []
    for name in attempted():
        verdict = store.verdict(name, backend)
        row = store.rows.get(name)
        wanted = {None: True, "failed": verdict not in ("", "equal"), "new": not verdict}.get(
            options.only, verdict == options.only
        )
        matches = not options.names or any(fnmatch.fnmatch(name, pattern) for pattern in options.names)
        of_kind = not options.kind or (row is not None and row.kind in options.kind)
        if wanted and matches and of_kind:
            names.append(name)
    return names


def _work(todo: Iterator[str], lock: threading.Lock, options: argparse.Namespace, store: Store) -> None:
    """One worker with an engine of its own: takes names until none is left."""
    harness = Harness()
    try:
        while True:
            with lock:
                name = next(todo, None)
            if name is None:
                return
            _run_one(harness, name, options, store)
    finally:
        harness.close()


def _run_one(harness: Harness, name: str, options: argparse.Namespace, store: Store) -> None:
    expected = expect(harness, name)
    if options.compiled and not isinstance(expected, str):
        result = attempt(harness, name, expected, "ours", options.timeout, compiled=True)
        print(f"{name:26} compiled     ours    {result.verdict:8} {result.reason[:240]}", flush=True)
        return
    for backend in options.backend or BACKENDS:
        if isinstance(expected, str):
            result, kind, class_name = Result("unmade", expected), "", ""
        else:
            result = attempt(harness, name, expected, backend, options.timeout)
            kind, class_name = expected.kind, expected.class_name
        store.put(name, kind, class_name, backend, result)
        print(f"{name:26} {kind:12} {backend:7} {result.verdict:8} {result.reason[:240]}", flush=True)


def main(argv: list[str]) -> int:
    """Run what is chosen and print the table; the exit status is 0 if each of ours is equal."""
    options = _parse(argv)
    store = Store()
    names = _chosen(options, store)
    if not options.show:
        todo, lock = iter(names), threading.Lock()
        workers = [threading.Thread(target=_work, args=(todo, lock, options, store)) for _ in range(options.workers)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    print_table(store, names)
    return int(any(store.verdict(name, "ours") != "equal" for name in names))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
