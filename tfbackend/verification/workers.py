"""The two kinds of process that a verification starts: the oracle's, without vLLM, and the engines'."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tfbackend.verification import engine, oracle, pooling_engine
from tfbackend.verification.answers import EngineRequest, PoolRequest, Prompt
from tfbackend.verification.machine import devices
from tfbackend.verification.processes import Outcome, WarmProcess

ORACLE_TIMEOUT = 1800.0
ENGINE_TIMEOUT = 900.0
"""Seconds. An engine may have to read many gigabytes, and the oracle to think about them."""

_ORACLE_IMPORTS = ("torch", "transformers.models.auto.modeling_auto", "tfbackend.verification.pooling_oracle")
# The slow imports of an engine start. None of them loads plugins, a model class or a device.
_ENGINE_IMPORTS = (
    "vllm",
    "vllm.entrypoints.llm",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.model_executor.model_loader",
    "transformers.models.auto.modeling_auto",
    "tfbackend.verification.engine",
    "tfbackend.verification.pooling_engine",
)
_CPU_IMPORTS = ("vllm.v1.worker.cpu_worker", "vllm.v1.attention.backends.cpu_attn")

# Set where the user has not set them.
_DEFAULTS = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Threads that wait for each other on cores that others use too take thirty times as long as one thread.
    "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // 2)),
    "OMP_WAIT_POLICY": "passive",
}
_FIXED = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # so that an error is the engine's own, and its model can be looked at
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # functions are sent to other ranks
}


class Workers:
    """Both processes, started when they are first asked.

    Args:
        env: what they run under, over the environment of this process.
        cwd: where they run.
        imports: what the engines' process imports beside what every engine does.
    """

    def __init__(
        self, env: Mapping[str, str] | None = None, cwd: Path | None = None, imports: tuple[str, ...] = ()
    ) -> None:
        defaults = {name: value for name, value in _DEFAULTS.items() if name not in os.environ}
        settings = defaults | _FIXED | dict(env or {})
        imports += _ENGINE_IMPORTS if devices() else _ENGINE_IMPORTS + _CPU_IMPORTS
        self._oracle = WarmProcess(_ORACLE_IMPORTS, settings, cwd)
        self._engine = WarmProcess(imports, settings, cwd)

    def ask(self, model: str, prompts: tuple[Prompt, ...], max_tokens: int, trust_remote_code: bool) -> Outcome:
        """The oracle's answers: a list of `Answer`."""
        return self.call_oracle(oracle.ask, model, prompts, max_tokens, trust_remote_code)

    def call_oracle(self, function: Callable[..., Any], *args: Any) -> Outcome:
        """Run a function where Transformers is imported and vLLM is not."""
        return self._oracle.call(function, *args, timeout=ORACLE_TIMEOUT)

    def serve(self, request: EngineRequest, env: Mapping[str, str] | None = None) -> Outcome:
        """One engine: a `Served`."""
        return self._engine.call(engine.serve, request, env=env, timeout=ENGINE_TIMEOUT)

    def pool(self, request: PoolRequest, env: Mapping[str, str] | None = None) -> Outcome:
        """One engine that pools: a `Pooled`."""
        return self._engine.call(pooling_engine.pool, request, env=env, timeout=ENGINE_TIMEOUT)

    def close(self) -> None:
        """Stop both."""
        self._oracle.stop()
        self._engine.stop()
