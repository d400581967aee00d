"""Starts one vLLM engine, asks it, and brings back plain values. Runs in a process of its own; imports vllm there."""

from __future__ import annotations

import math
import time
from typing import Any

from tfbackend.verification.answers import Answer, EngineRequest, Served
from tfbackend.verification.engine_log import LOADED

TOP = 5

OPTIONS: dict[str, Any] = {
    "model_impl": "transformers",
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "enable_prefix_caching": False,
    "max_num_seqs": 32,
    "seed": 0,
    "disable_log_stats": True,
}


def serve(request: EngineRequest) -> Served:
    """Start the engine, send the batches, look at the model. Lets every error of vLLM's through."""
    from vllm import LLM, SamplingParams

    start = time.monotonic()
    llm = LLM(model=request.model, **(OPTIONS | dict(request.options)))
    seconds = time.monotonic() - start
    print(LOADED, flush=True)
    params = SamplingParams(
        temperature=0.0, max_tokens=request.max_tokens, logprobs=TOP, ignore_eos=True, detokenize=False
    )
    watch(llm, find_nonfinite=request.find_nonfinite)
    batches, cached = [], []
    for prompts in request.batches:
        outputs = llm.generate([{"prompt_token_ids": list(p)} for p in prompts], params, use_tqdm=False)
        batches.append(tuple(map(_answer, outputs)))
        cached.append(tuple(output.num_cached_tokens or 0 for output in outputs))
        values.stop()
    name, largest, graphs = look_back(llm)
    found, checked = values.found, values.checked
    return Served(tuple(batches), tuple(cached), name, largest, graphs, found, checked, seconds)


def watch(llm: Any, *, find_nonfinite: bool) -> None:
    """Have each rank note how many tokens it is given, and whether what its modules give is finite."""
    llm.apply_model(_watch_tokens)
    if find_nonfinite:
        llm.apply_model(_watch_values)


def look_back(llm: Any) -> tuple[str, int, int]:
    """Full name of the class that served, the largest forward, the number of compiled graphs. Ends the other ranks."""
    name, largest, graphs = llm.apply_model(_describe)[0]
    if llm.llm_engine.vllm_config.parallel_config.world_size > 1:
        llm.llm_engine.engine_core.shutdown()  # shared memory of other ranks would outlive the process
    return name, largest, graphs


def _answer(output: Any) -> Answer:
    """An answer of vLLM's in our words; differences of log-probabilities are those of logits."""
    sampled = output.outputs[0]
    tops = []
    for entry in sampled.logprobs:
        ranked = sorted(entry.items(), key=lambda item: -item[1].logprob)
        tops.append(tuple((token, float(found.logprob)) for token, found in ranked))
    logprobs = tuple(float(e[t].logprob) for e, t in zip(sampled.logprobs, sampled.token_ids, strict=True))
    margins = tuple(top[0][1] - top[1][1] if len(top) > 1 else math.inf for top in tops)
    return Answer(tuple(sampled.token_ids), logprobs, margins, tuple(tops))


class _Tokens:
    largest = 0


class _Values:
    """What was seen of module outputs: how many were looked at, and the first that was not finite."""

    checked = 0
    found = ""

    def __init__(self) -> None:
        self.hooks: list[Any] = []

    def stop(self) -> None:
        """Look no further: looking takes longer than the forwards do."""
        for hook in self.hooks:
            hook.remove()
        self.hooks = []


_tokens, values = _Tokens(), _Values()


def _watch_tokens(model: Any) -> None:
    """From now on remember the largest number of tokens that one forward was given."""
    model.register_forward_pre_hook(_note_tokens, with_kwargs=True)


def _note_tokens(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    positions = kwargs["positions"] if "positions" in kwargs else args[1]
    _tokens.largest = max(_tokens.largest, positions.shape[-1])


def _watch_values(model: Any) -> None:
    """Until `stop` look at every output of every module; and at the logits of every forward."""
    for name, module in model.named_modules():
        values.hooks.append(module.register_forward_hook(_noter(name or type(model).__name__)))
    if not hasattr(model, "compute_logits"):
        return  # a model that pools gives its answers to be looked at
    compute, note = model.compute_logits, _noter("logits")

    def compute_logits(*args: Any, **kwargs: Any) -> Any:
        logits = compute(*args, **kwargs)
        note(model, args, logits)
        return logits

    model.compute_logits = compute_logits


def _noter(name: str) -> Any:
    def note(_module: Any, _args: Any, output: Any) -> None:
        import torch
        from torch.utils._pytree import tree_leaves

        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                values.checked += 1
                if not values.found and not bool(torch.isfinite(leaf).all()):
                    values.found = name

    return note


def _describe(model: Any) -> tuple[str, int, int]:
    """Full name of the class that serves, the largest forward, the number of compiled graphs."""
    from torch._dynamo.utils import counters

    cls = type(model)
    return f"{cls.__module__}.{cls.__qualname__}", _tokens.largest, int(counters["stats"]["unique_graphs"])
