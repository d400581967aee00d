"""Runs verifications with a fault planted, or none; what does not depend on the fault is asked once."""

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.verification.faults import VARIABLE
from tfbackend.verification import rungs
from tfbackend.verification.answers import EngineRequest, PoolRequest
from tfbackend.verification.ladder import Report, Request, climb
from tfbackend.verification.processes import Outcome
from tfbackend.verification.workers import Workers

RANK_FAULTS = {"wrong shard on rank 1": "tp2", "hidden states lost between stages": "pp2"}
"""Faults that show on several ranks alone, and the rung that says so."""
_SIZES = {"tp2": "tensor_parallel_size", "pp2": "pipeline_parallel_size"}
ROOT = Path(__file__).resolve().parents[2]
_ENTRY_POINTS = "[vllm.general_plugins]\ntfbackend_planted_faults = tests.verification.faults:plant\n"
_METADATA = "Metadata-Version: 2.1\nName: tfbackend-planted-faults\nVersion: 0\n"


class Planter:
    """The processes that all verifications of the tests share, their checkpoints, and what was asked before."""

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="tfbackend-verification-"))
        self.workers = Workers(_environment(self.root), ROOT, ("tests.serve.warmup",))
        self._asked: dict[Any, Outcome] = {}
        self._served: dict[Any, Outcome] = {}
        self.fault = ""

    def verify(self, model: str, fault: str = "", level: str = rungs.QUICK) -> Report:
        """Verify the model in engines that have the fault."""
        self.fault = fault
        return climb(Request(model, level, proofs=self.root / "proofs"), self)

    def ask(self, *args: Any) -> Outcome:
        """The oracle, the same question once."""
        if str(args) not in self._asked:
            self._asked[str(args)] = self.workers.ask(*args)
        return self._asked[str(args)]

    def call_oracle(self, *args: Any) -> Outcome:
        """Anything else of Transformers."""
        return self.workers.call_oracle(*args)

    def serve(self, request: EngineRequest) -> Outcome:
        """An engine with the fault; one without it where the fault needs two ranks to show."""
        size = _SIZES.get(RANK_FAULTS.get(self.fault, ""))
        fault = "" if size is not None and request.options.get(size, 1) == 1 else self.fault
        key = (str(request), fault)
        if key not in self._served:
            self._served[key] = self.workers.serve(request, env={VARIABLE: fault})
        return self._served[key]

    def pool(self, request: PoolRequest) -> Outcome:
        """Likewise of an engine that pools."""
        key = (str(request), self.fault)
        if key not in self._served:
            self._served[key] = self.workers.pool(request, env={VARIABLE: self.fault})
        return self._served[key]

    def close(self) -> None:
        """Stop the processes and remove everything."""
        self.workers.close()
        shutil.rmtree(self.root)


def _environment(root: Path) -> Mapping[str, str]:
    plugin = root / "plugin" / "tfbackend_planted_faults-0.dist-info"
    plugin.mkdir(parents=True)
    (plugin / "entry_points.txt").write_text(_ENTRY_POINTS)
    (plugin / "METADATA").write_text(_METADATA)
    return {
        "PYTHONPATH": f"{ROOT}:{plugin.parent}",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CACHE_ROOT": str(root / "cache" / "vllm"),
        "XDG_CACHE_HOME": str(root / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(root / "cache" / "inductor"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }


def verdicts(report: Report) -> dict[str, str]:
    """Verdict by rung."""
    return {result.rung.name: result.finding.verdict for result in report.results}


def finding(report: Report, rung: str) -> rungs.Finding:
    """What one rung found."""
    return next(result.finding for result in report.results if result.rung.name == rung)


def failed(report: Report) -> Sequence[str]:
    """The rungs that failed, in order."""
    return [name for name, verdict in verdicts(report).items() if verdict == rungs.FAIL]


def in_words(report: Report) -> str:
    """All that was found, for the message of a failing test."""
    return "\n".join(f"{r.rung.name}: {r.finding}" for r in report.results)
