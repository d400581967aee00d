"""Asks a pooling engine, in a process of its own."""

from dataclasses import dataclass, field
from typing import Any

from tests.serve.engine import fork_ranks
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
    if getattr(plan, "alone", ()):
        return f"prompt by prompt: {plan.alone[0]}"
    return str(plan.classifier) if getattr(plan, "classifier", None) else ""


def _raw_logits(llm: Any, prompts: list[list[int]]) -> list[Any]:
    from vllm import PoolingParams

    params = PoolingParams(task="classify", use_activation=False)
    given = [{"prompt_token_ids": ids} for ids in prompts]
    outputs = llm.encode(given, params, pooling_task="classify", use_tqdm=False)
    return [output.outputs.data.float().tolist() for output in outputs]


def pool_after_refusals(folder: str, prompts: list[list[int]]) -> tuple[list[str], list[Any]]:
    """(what is said to a prompt without its end, and to one with types of tokens; what the prompts get then)."""
    from vllm import LLM, PoolingParams

    llm = LLM(model=folder, **DEFAULT_ARGS)
    typed = PoolingParams(task="classify", extra_kwargs={"compressed_token_type_ids": 1})
    refusals = []
    for ids, params in (([5, 6, 7], None), (prompts[0], typed)):
        try:
            llm.encode([{"prompt_token_ids": ids}], params, pooling_task="classify", use_tqdm=False)
        except ValueError as error:
            refusals.append(str(error))
    answers = _raw_logits(llm, prompts)
    llm.llm_engine.engine_core.shutdown()
    return refusals, answers


def pool_after_refused_types(folder: str, prompts: list[list[int]]) -> tuple[str, list[Any]]:
    """Likewise on two ranks, of one prompt that has types of tokens."""
    from vllm import LLM, PoolingParams

    fork_ranks()
    llm = LLM(model=folder, **DEFAULT_ARGS, tensor_parallel_size=2)
    refusal = ""
    typed = PoolingParams(task="classify", extra_kwargs={"compressed_token_type_ids": 1})
    try:
        llm.encode([{"prompt_token_ids": prompts[0]}], typed, pooling_task="classify", use_tqdm=False)
    except (ValueError, AssertionError) as error:
        refusal = f"{type(error).__name__}: {error}"
    answers = _raw_logits(llm, prompts)
    llm.llm_engine.engine_core.shutdown()
    return refusal, answers


def reward_steps(folder: str, prompts: list[list[int]], end: int, label: int) -> list[list[list[float]]]:
    """Raw scores [steps, 1] of one label, of the tokens `end` of each prompt, as users ask for those of a process."""
    from vllm import LLM, PoolingParams
    from vllm.config import PoolerConfig

    pooler = PoolerConfig(tok_pooling_type="STEP", step_tag_id=end, returned_token_ids=[label])
    llm = LLM(model=folder, **DEFAULT_ARGS, pooler_config=pooler)
    params = PoolingParams(use_activation=False)
    given = [{"prompt_token_ids": ids} for ids in prompts]
    outputs = llm.encode(given, params, pooling_task="token_classify", use_tqdm=False)
    scores = [output.outputs.data.float().tolist() for output in outputs]
    llm.llm_engine.engine_core.shutdown()
    return scores


def rank(folder: str, tokens: list[str], query: str, documents: list[str]) -> list[float]:
    """Scores of documents by a checkpoint of Qwen3's language model, as its users ask vLLM for them."""
    from vllm import LLM

    overrides = {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": tokens,
                 "is_original_qwen3_reranker": True}  # fmt: skip
    llm = LLM(model=folder, **DEFAULT_ARGS, hf_overrides=overrides)
    scores = [output.outputs.score for output in llm.score(query, documents, use_tqdm=False)]
    llm.llm_engine.engine_core.shutdown()
    return scores


def embed_texts(folder: str, texts: list[str]) -> tuple[str, list[list[float]]]:
    """(the class that served, vectors of texts by the embedding API)."""
    from vllm import LLM

    llm = LLM(model=folder, **(DEFAULT_ARGS | {"max_model_len": 256}))
    vectors = [list(output.outputs.embedding) for output in llm.embed(texts, use_tqdm=False)]
    name = llm.apply_model(model_class)[0]
    llm.llm_engine.engine_core.shutdown()
    return name, vectors
