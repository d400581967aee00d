"""What became of each architecture with each head under each backend, kept as JSON between runs."""

import fcntl
import json
import os
from dataclasses import asdict
from pathlib import Path

from tests.serve.matrix.results import versions
from tests.serve.pooling.checkpoint import architectures
from tests.serve.pooling.judge import TASKS, Verdict
from tests.serve.warm import ROOT

PATH = ROOT / ".cache" / "pooling.json"
HEADS = tuple(TASKS)

Key = tuple[str, str, str]
"""Model type, head, backend."""


class Store:
    """Verdicts by `Key`. Every change is written at once, on top of what other runs have written."""

    def __init__(self, path: Path = PATH) -> None:
        self.path = path
        self.verdicts = self._read()

    def _read(self) -> dict[Key, Verdict]:
        rows = json.loads(self.path.read_text())["rows"] if self.path.exists() else []
        return {(row.pop("name"), row.pop("head"), row.pop("backend")): Verdict(**row) for row in rows}

    def put(self, key: Key, verdict: Verdict) -> None:
        """Record a verdict and write the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.verdicts = self._read() | {key: verdict}
            named = (dict(zip(("name", "head", "backend"), k, strict=True)) for k in sorted(self.verdicts))
            rows = [row | asdict(self.verdicts[k]) for row, k in zip(named, sorted(self.verdicts), strict=True)]
            temporary = self.path.with_suffix(f".{os.getpid()}.tmp")
            temporary.write_text(json.dumps({"versions": versions(), "rows": rows}, indent=1) + "\n")
            temporary.replace(self.path)

    def counts(self, head: str, backend: str) -> dict[str, int]:
        """How many architectures there are of each verdict, most first; "not run" counts too."""
        found = [self.verdicts.get((name, head, backend)) for name in architectures(head)]
        names = [verdict.verdict if verdict else "not run" for verdict in found]
        return dict(sorted(((name, names.count(name)) for name in set(names)), key=lambda pair: -pair[1]))
