"""Asks a pooling engine, in a process of its own."""

from dataclasses import dataclass, field
from typing import Any

from tests.serve.probes import model_class

DEFAULT_ARGS: dict[str, Any] = {
    "model_impl": "transformers",
    "runner": "pooling",
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 128,
    "max_num_seqs": 8,
    "seed": 0,
}


@dataclass(frozen=True)
class Request:
    """One engine start, and one batch of prompts for it.

    ``types`` has the token of each prompt at which type 1 begins, if any does.
    """

    folder: str
    prompts: tuple[tuple[int, ...], ...]
    task: str = "classify"
    use_activation: bool = False
    types: tuple[int | None, ...] = ()
    engine_args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Pooled:
    """What the engine gave for each prompt, twice: first all in one call, then each alone."""

    together: list[Any]
    alone: list[Any]
    model_class: str
    classifier: str


def pool(request: Request) -> Pooled:
    """Start the engine and ask it. Runs in a forked child."""
    from vllm import LLM, PoolingParams
    from vllm.config import PoolerConfig

    pooler = PoolerConfig(task=request.task)
    llm = LLM(model=request.folder, **(DEFAULT_ARGS | {"pooler_config": pooler} | request.engine_args))
    types = request.types or (None,) * len(request.prompts)
    params = []
    for start in types:
        extra = {"extra_kwargs": {"compressed_token_type_ids": start}} if start is not None else {}
        params.append(PoolingParams(task=request.task, use_activation=request.use_activation, **extra))

    def ask(places: Any) -> list[Any]:
        given = [{"prompt_token_ids": list(request.prompts[i])} for i in places]
        outputs = llm.encode(given, [params[i] for i in places], pooling_task=request.task, use_tqdm=False)
        return [output.outputs.data.float().tolist() for output in outputs]

    together = ask(range(len(types)))
    alone = [ask([i])[0] for i in range(len(types))]
    pooled = Pooled(together, alone, llm.apply_model(model_class)[0], llm.apply_model(_classifier)[0])
    llm.llm_engine.engine_core.shutdown()
    return pooled


def _classifier(model: Any) -> str:
    plan = getattr(model, "plan", None)
    return str(plan.classifier) if getattr(plan, "classifier", None) else ""
