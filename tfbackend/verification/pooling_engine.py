"""Starts one vLLM engine that pools, asks it, and brings back plain values; as engine.py does of one that generates."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tfbackend.verification.answers import Pooled, PoolRequest, Rows, Text
from tfbackend.verification.engine import OPTIONS, look_back, values, watch
from tfbackend.verification.engine_log import LOADED

_OPTIONS: dict[str, Any] = OPTIONS | {"runner": "pooling", "skip_tokenizer_init": False}


def pool(request: PoolRequest) -> Pooled:
    """Start the engine, send the batches, look at the model. Lets every error of vLLM's through."""
    from vllm import LLM

    start = time.monotonic()
    with _tokenizer() as folder:
        tokenizer = {} if request.own_tokenizer else {"tokenizer": folder}
        llm = LLM(model=request.model, **(_OPTIONS | tokenizer | dict(request.options)))
    seconds = time.monotonic() - start
    print(LOADED, flush=True)
    watch(llm, find_nonfinite=request.find_nonfinite)
    batches = []
    for texts in request.batches:
        params = [_params(request.task, text) for text in texts]
        prompts = [{"prompt_token_ids": list(text.ids)} for text in texts]
        outputs = llm.encode(prompts, params, pooling_task=request.task, use_tqdm=False)
        batches.append(tuple(_rows(output.outputs.data) for output in outputs))
        values.stop()
    name, _, graphs = look_back(llm)
    return Pooled(tuple(batches), name, graphs, values.found, values.checked, seconds)


@contextmanager
def _tokenizer() -> Iterator[str]:
    """A folder with a tokenizer that spells tokens as numbers: vLLM wants one, and no text goes through it."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({str(number): number for number in range(10)}, unk_token="0"))
    with tempfile.TemporaryDirectory(prefix="tfbackend-numbers-") as folder:
        PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", unk_token="0").save_pretrained(folder)
        yield folder


def _params(task: str, text: Text) -> Any:
    from vllm import PoolingParams

    told: dict[str, Any] = {}
    if task.endswith("classify"):
        told["use_activation"] = False
    if text.second is not None:
        told["extra_kwargs"] = {"compressed_token_type_ids": text.second}
    return PoolingParams(task=task, **told)


def _rows(data: Any) -> Rows:
    """What vLLM gives for a text, [numbers] or [tokens, numbers]."""
    rows = data.float().reshape(-1, data.shape[-1]) if data.dim() else data.float().reshape(1, 1)
    return tuple(tuple(row) for row in rows.tolist())
