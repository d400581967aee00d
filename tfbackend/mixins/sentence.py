"""Poolers for the folders of sentence-transformers, whose modules vLLM knows some of, and of those a part."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from safetensors.torch import load
from vllm.config import ModelConfig, PoolerConfig
from vllm.logger import init_logger
from vllm.model_executor.layers.pooler import DispatchPooler
from vllm.model_executor.layers.pooler.activations import PoolerNormalize
from vllm.model_executor.layers.pooler.seqwise import (
    EmbeddingPoolerHead,
    SequencePooler,
    SequencePoolingMethod,
    get_seq_pooling_method,
)
from vllm.model_executor.layers.pooler.tokwise import TokenEmbeddingPoolerHead, TokenPooler, get_tok_pooling_method
from vllm.tasks import PoolingTask
from vllm.transformers_utils.config import get_hf_file_to_dict
from vllm.transformers_utils.repo_utils import get_hf_file_bytes
from vllm.v1.pool.metadata import PoolingMetadata

from tfbackend.sentence import SentencePlan, build_steps, pool, sentence_plan

logger = init_logger("vllm.tfbackend")


def plan_of(config: ModelConfig) -> SentencePlan | None:
    """What the folder's files say, None where there are none.

    Raises:
        UnsupportedModelError: they list something that cannot be done.
    """
    return sentence_plan(lambda name: get_hf_file_to_dict(name, config.model, config.revision))


def settle_activation(config: ModelConfig) -> None:
    """Let vectors have length one where the folder's files say so, unless the user has said something."""
    plan, pooler, sources = plan_of(config), config.pooler_config, getattr(config, "_pooler_config_sources", {})
    if plan is not None and pooler is not None and sources.get("use_activation") != "user":
        pooler.use_activation = plan.normalised


def sentence_pooler(
    plan: SentencePlan, model: ModelConfig, pooler: PoolerConfig, device: torch.device, *, chosen: bool
) -> DispatchPooler:
    """What the plan says, for a vector of a text where it pools, and of each token where that has the same modules
    behind it.

    Args:
        chosen: whether the user chose which token stands for a text.

    Raises:
        CheckpointError: the weights of a module are not there, or do not fit it.
    """
    steps = build_steps(plan.steps, lambda path: _weights(model, path))
    if steps is not None:
        steps.to(device, model.head_dtype)
    if plan.skipped:
        logger.info("tokens of %s have vectors too: who compares texts leaves them out", " ".join(plan.skipped))
    token_head = TokenEmbeddingPoolerHead(head_dtype=model.head_dtype, projector=steps, activation=PoolerNormalize())
    tokens = TokenPooler(pooling=get_tok_pooling_method(pooler.get_tok_pooling_type()), head=token_head)
    if not plan.modes:
        return DispatchPooler({"token_embed": tokens})
    head = EmbeddingPoolerHead(head_dtype=model.head_dtype, projector=steps, activation=PoolerNormalize())
    method = get_seq_pooling_method(pooler.get_seq_pooling_type()) if chosen else SentencePool(plan.modes)
    embed = SequencePooler(pooling=method, head=head)
    # Modules behind several vectors side by side take no token's one.
    narrow = len(plan.modes) == 1 or steps is None
    return DispatchPooler({"token_embed": tokens, "embed": embed} if narrow else {"embed": embed})


def _weights(config: ModelConfig, path: str) -> Mapping[str, torch.Tensor] | None:
    """Tensors of a module."""
    folder = f"{path}/" if path else ""
    if found := get_hf_file_bytes(f"{folder}model.safetensors", config.model, config.revision):
        read: Mapping[str, torch.Tensor] = load(found)
        return read
    if found := get_hf_file_bytes(f"{folder}pytorch_model.bin", config.model, config.revision):
        tensors: Mapping[str, Any] = torch.load(io.BytesIO(found), map_location="cpu", weights_only=True)
        return tensors
    return None


class SentencePool(SequencePoolingMethod):
    """One vector for each mode of a Pooling, side by side."""

    def __init__(self, modes: Sequence[str]) -> None:
        super().__init__()
        self.modes = tuple(modes)

    def get_supported_tasks(self) -> Set[PoolingTask]:
        return {"embed"}

    def forward(self, hidden_states: torch.Tensor, pooling_metadata: PoolingMetadata) -> torch.Tensor:
        """[tokens of all texts, hidden] -> [texts, modes * hidden] in float32."""
        cursor = pooling_metadata.get_pooling_cursor()
        if cursor.is_partial_prefill():
            raise RuntimeError("a call holds a part of a text only")
        texts = torch.split(hidden_states, cursor.num_scheduled_tokens_cpu.tolist())
        return torch.stack([torch.cat([pool(mode, text) for mode in self.modes]) for text in texts])
