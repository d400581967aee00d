"""An engine in a process of its own that is told what to do by lines, and answers each with a line of JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CONTESTANTS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "tfbackend": ({"model_impl": "transformers"}, {}),
    "in-tree": ({"model_impl": "transformers"}, {"TFBACKEND_DISABLE": "1"}),
    "native": ({"model_impl": "vllm"}, {}),
}
"""By name: settings of its engine, and variables of its environment."""
_ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}


class EngineProcess:
    """One contestant.

    Args:
        name: what it is called.
        arguments: of `python -m`.
        env: what it runs under beside the environment of this process.
        log: where what it says on standard error goes.
    """

    def __init__(self, name: str, arguments: list[str], env: dict[str, str], log: Path) -> None:
        self.name, self.log = name, log
        self.process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            cwd=ROOT,
            env=os.environ | _ENVIRONMENT | env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
        )

    def answer(self) -> dict[str, Any]:
        """The next line that the engine process writes; the program ends if it died."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{self.name} died; the end of its log:\n" + "\n".join(self.log.read_text().splitlines()[-15:]))
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, **turn: Any) -> dict[str, Any]:
        """Send one turn and wait for its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(turn) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def stop(self) -> None:
        """End the engine process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)
