"""The warm processes of `tfbackend verify`, run where the tests can be imported."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from tfbackend.verification import processes
from tfbackend.verification.processes import Outcome

__all__ = ["ROOT", "Outcome", "WarmProcess"]

ROOT = Path(__file__).resolve().parents[2]


class WarmProcess(processes.WarmProcess):
    """A process that has done the slow imports and forks a child for each call."""

    def __init__(self, imports: Sequence[str], env: Mapping[str, str]) -> None:
        super().__init__(imports, env, ROOT)
