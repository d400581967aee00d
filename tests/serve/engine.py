"""Runs a real vLLM engine in a forked child and brings back plain values."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.serve.fused import count_sites
from tests.serve.oracle import Answer, make_and_ask
from tests.serve.probes import model_class
from tests.serve.tiny import VARIANTS, make_prompts
from tests.serve.warm import Outcome, WarmProcess

# The class that must have served: a plugin that did not load leaves vLLM's own backend, which would pass most tests.
OURS = "tfbackend.models.TransformersForCausalLM"

MAX_TOKENS = 12

ENGINE_TIMEOUT = 240.0

# The slow imports of an engine start. None of them loads plugins or a model class.
ENGINE_IMPORTS = (
    "vllm",
    "vllm.entrypoints.llm",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.model_loader",
    "transformers.models.auto.modeling_auto",
    "tests.serve.engine",
    "tests.serve.warmup",
)
ORACLE_IMPORTS = ("torch", "transformers", "transformers.models.auto.modeling_auto", "tests.serve.oracle")


@dataclass(frozen=True)
class Request:
    """One engine start and the batches to send it, one ``generate`` call each.

    ``prepare`` and ``inspect`` are given the model before and after; they are importable by name.
    """

    folder: str
    batches: tuple[tuple[tuple[int, ...], ...], ...]
    max_tokens: int = MAX_TOKENS
    engine_args: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[Any], Any] | None = None
    inspect: Callable[[Any], Any] | None = None
    timeout: float = ENGINE_TIMEOUT


@dataclass(frozen=True)
class Batch:
    """What one ``generate`` call gave for each prompt: tokens, their log-probabilities, cached prompt tokens."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    cached: list[int]


@dataclass(frozen=True)
class Served:
    """What one engine gave: its batches, what ``inspect`` returned on each rank, and the model class that served."""

    batches: list[Batch]
    inspected: list[Any]
    model_class: list[str]


DEFAULT_ARGS: dict[str, Any] = {
    "model_impl": "transformers",
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 512,  # a cache of a gigabyte takes longer to fill with zeros than most requests
    "seed": 0,
}


def serve(request: Request) -> Served:
    """Start the engine, send the batches, inspect the model. Runs in the forked child."""
    from vllm import LLM, SamplingParams

    fork_ranks()
    llm = LLM(model=request.folder, **(DEFAULT_ARGS | request.engine_args))
    params = SamplingParams(
        temperature=0.0, max_tokens=request.max_tokens, logprobs=2, ignore_eos=True, detokenize=False
    )
    if request.prepare:
        llm.apply_model(request.prepare)
    batches = []
    for prompts in request.batches:
        outputs = llm.generate([{"prompt_token_ids": list(p)} for p in prompts], params, use_tqdm=False)
        batches.append(_batch(outputs))
    inspected = llm.apply_model(request.inspect) if request.inspect else []
    served = Served(batches, inspected, llm.apply_model(model_class))
    if llm.llm_engine.vllm_config.parallel_config.world_size > 1:
        llm.llm_engine.engine_core.shutdown()  # shared memory of other ranks would outlive the process
    return served


def fork_ranks() -> None:
    """Let each rank be a fork of this process, where vLLM on a CPU would start one that imports everything again.

    The `tp2` rung of tests/verification starts them vLLM's way.
    """
    import multiprocessing

    from vllm.v1.executor import multiproc_executor

    multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")


def _batch(outputs: list[Any]) -> Batch:
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    logprobs = [
        [entry[token].logprob for entry, token in zip(output.outputs[0].logprobs, ids, strict=True)]
        for output, ids in zip(outputs, tokens, strict=True)
    ]
    return Batch(tokens, logprobs, [output.num_cached_tokens or 0 for output in outputs])


class Harness:
    """Two warm processes (Transformers alone; vLLM), the checkpoints made so far, and what was asked of them.

    Nothing outlives the harness: caches of vLLM, Inductor and tfbackend lie in its own temporary folder, where the
    children share them, so no run can be judged by what an earlier version left behind.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="tfbackend-serve-")
        self.root = Path(self._folder.name)
        env = _environment(self.root)
        self._oracle = WarmProcess(ORACLE_IMPORTS, env)
        self._engine = WarmProcess(ENGINE_IMPORTS, env)
        self._answers: dict[Any, list[Answer]] = {}
        self._served: dict[Any, Outcome] = {}

    def checkpoint(self, name: str) -> str:
        """The folder where the variant's checkpoint is, or will be once the oracle was asked."""
        return str(self.root / "models" / name)

    def expected(self, name: str, prompts: list[list[int]] | None = None, max_tokens: int = MAX_TOKENS) -> list[Answer]:
        """The oracle's answers for a variant; makes its checkpoint."""
        prompts = prompts or make_prompts()
        key = (name, str(prompts), max_tokens)
        if key not in self._answers:
            outcome = self.ask_oracle(make_and_ask, VARIANTS[name], self.checkpoint(name), prompts, max_tokens)
            self._answers[key] = outcome
        return self._answers[key]

    def ask_oracle(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function where Transformers is imported and vLLM is not; its error is ours."""
        outcome = self._oracle.call(function, *args, timeout=180)
        if not outcome.ok:
            raise RuntimeError(f"the oracle failed: {outcome.error}\n{outcome.tail()}")
        return outcome.value

    def plain_request(self, name: str) -> Request:
        """The standard prompts for a variant, eager, one rank; its fused sites are counted on the way."""
        prompts = tuple(map(tuple, make_prompts()))
        return Request(self.checkpoint(name), (prompts,), inspect=count_sites)

    def serve(self, request: Request, *, env: dict[str, str] | None = None) -> Outcome:
        """Run an engine, equal requests once; the outcome holds a ``Served`` or says what went wrong."""
        key = (str(request), str(env))
        if key not in self._served:
            self._served[key] = self._engine.call(serve, request, env=env, timeout=request.timeout)
        return self._served[key]

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Outcome:
        """Run any function in a fork of the process that has imported vLLM."""
        return self._engine.call(function, *args, **kwargs)

    def close(self) -> None:
        """Stop both processes and remove everything."""
        self._oracle.stop()
        self._engine.stop()
        self._folder.cleanup()


def _environment(root: Path) -> dict[str, str]:
    """What both warm processes run under; a call may add to it."""
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CACHE_ROOT": str(root / "cache" / "vllm"),
        "XDG_CACHE_HOME": str(root / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(root / "cache" / "inductor"),
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # apply_model sends functions to tensor-parallel ranks
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "1",  # ranks on a CPU do not end by themselves
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
