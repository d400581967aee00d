"""The modules of a sentence-transformers folder, as far as vLLM would not do them or do them wrongly in silence."""

from __future__ import annotations

from collections.abc import Sequence, Set

import torch
from torch import nn
from vllm.config import ModelConfig
from vllm.model_executor.layers.pooler import DispatchPooler
from vllm.model_executor.layers.pooler.seqwise import SequencePooler, SequencePoolingMethod
from vllm.tasks import PoolingTask
from vllm.transformers_utils.config import get_hf_file_to_dict
from vllm.v1.pool.metadata import PoolingMetadata

from tfbackend.errors import CheckpointError
from tfbackend.sentence import module_names, pool, pooling_modes


def settle_sentence(config: ModelConfig, pooler: DispatchPooler, *, chosen: bool) -> None:
    """Let `pooler` pool as the folder's files say, unless it was `chosen` otherwise, and see that vLLM read the rest.

    Raises:
        UnsupportedModelError: the files list something that cannot be done.
        CheckpointError: vLLM could not read a Dense module, and would have left it out.
    """
    listed = get_hf_file_to_dict("modules.json", config.model, config.revision)
    if not listed:
        return
    modules = listed.get("modules", []) if isinstance(listed, dict) else listed
    names = module_names(modules)
    embed = pooler.poolers_by_task["embed"]
    assert isinstance(embed, SequencePooler)
    dense = names.count("Dense")
    projector = getattr(embed.head, "projector", None)
    read = sum(isinstance(m, nn.Linear) for m in projector.modules()) if isinstance(projector, nn.Module) else 0
    if read != dense:
        raise CheckpointError(
            "A Dense module of sentence-transformers could not be read.",
            where=config.model,
            found=f"{read} of {dense}; the log says why",
        )
    if not chosen:
        folder = modules[names.index("Pooling")].get("path", "")
        given = get_hf_file_to_dict(f"{folder}/config.json" if folder else "config.json", config.model, config.revision)
        embed.pooling = SentencePool(pooling_modes(given or {}))


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
