"""Faults to plant in an engine. The entry point of a plugin of vLLM's, which every process of an engine loads.

tests/verification/planting.py puts the plugin on the path; TFBACKEND_TEST_FAULT names the fault. The product knows
nothing of it.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

VARIABLE = "TFBACKEND_TEST_FAULT"


def plant() -> None:
    """Plant the fault that the environment names, if any, once."""
    name = os.environ.get(VARIABLE, "")
    if name and name not in _planted:
        _planted.add(name)
        FAULTS[name]()


_planted: set[str] = set()


def _change_attention(**fields: Callable[[Any], Any]) -> None:
    """Build attention layers from a spec with other fields than planned."""
    from tfbackend.layers import build
    from tfbackend.layerspecs import AttentionSpec

    right = build._BUILDERS[AttentionSpec]

    def wrong(spec: Any, *rest: Any) -> Any:
        return right(replace(spec, **{name: change(getattr(spec, name)) for name, change in fields.items()}), *rest)

    build._BUILDERS[AttentionSpec] = wrong


def _after_loading(change: Callable[[Any], None]) -> None:
    """Change the served model once its weights are there and its ledger has passed."""
    from tfbackend.mixins.base import Base

    right = Base.load_weights

    def wrong(self: Any, weights: Any) -> Any:
        loaded = right(self, weights)
        change(self)
        return loaded

    Base.load_weights = wrong


def _before_placing(change: Callable[[Any, Any], tuple[Any, Any]]) -> None:
    """Change (placement, tensor) of each tensor of the checkpoint once it has been decided where it goes."""
    from tfbackend.layers import loading

    right = loading._load_one

    def wrong(placement: Any, tensor: Any, *rest: Any) -> None:
        right(*change(placement, tensor), *rest)

    loading._load_one = wrong


def _swapped_qk() -> None:
    def change(placement: Any, tensor: Any) -> tuple[Any, Any]:
        swapped = {"q": "k", "k": "q"}.get(placement.shard, placement.shard)
        return replace(placement, shard=swapped), tensor

    _before_placing(change)


def _wrong_scale() -> None:
    _change_attention(scale=lambda scale: scale * 1.1)


def _dropped_bias() -> None:
    def change(model: Any) -> None:
        for layer in model.model.layers:
            layer.self_attn.qkv_proj.bias.zero_()

    _after_loading(change)


def _rotated_rope() -> None:
    """Halves are rotated where pairs should be, or the other way about."""
    from tfbackend.layers.rotary import Rotary

    right = Rotary.__init__

    def wrong(self: Any, *args: Any) -> None:
        right(self, *args)
        self.neox = not self.neox

    Rotary.__init__ = wrong


def _off_by_one_window() -> None:
    _change_attention(window=lambda window: window and window - 1)


def _sink_ignored() -> None:
    """The sinks are loaded, and attention does not have them."""
    _change_attention(sinks=lambda sinks: None)


def _untied_head() -> None:
    """The head has a table of its own that nothing filled."""
    import torch

    def change(model: Any) -> None:
        table = model.lm_head.weight
        model.lm_head.weight = torch.nn.Parameter(torch.full_like(table, 0.01).cumsum(0), requires_grad=False)

    _after_loading(change)


def _head_never_tied() -> None:
    from tfbackend.mixins.causal import CausalMixin

    CausalMixin._tie = lambda self, built: None


def _leaked_state() -> None:
    """Each request of a batch but the first reads the first request's first block of the KV cache."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

    right = CPUAttentionMetadataBuilder.build

    def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = right(self, *args, **kwargs)
        made.block_table = made.block_table.clone()
        made.block_table[1:, 0] = made.block_table[0, 0]
        return made

    CPUAttentionMetadataBuilder.build = wrong


def _wrong_shard() -> None:
    """The second rank has the first one's part of each attention's output matrix, and keeps its own of all else."""
    from vllm.distributed import get_tensor_model_parallel_rank

    def change(placement: Any, tensor: Any) -> tuple[Any, Any]:
        wrong = placement.target.endswith("o_proj.weight") and get_tensor_model_parallel_rank() == 1
        return placement, tensor.roll(tensor.shape[1] // 2, dims=1) if wrong else tensor

    _before_placing(change)


def _lost_between_stages() -> None:
    """A stage goes on from nothing in place of what the stage before it made."""
    from tfbackend.layers.stages import AbsentLayer

    right = AbsentLayer.forward

    def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.tfb_received = None
        return right(self, *args, **kwargs)

    AbsentLayer.forward = wrong


def _dropped_attention_cap() -> None:
    _change_attention(soft_cap=lambda cap: None)


def _dropped_logits_cap() -> None:
    """No greedy token changes."""
    from tfbackend.mixins.causal import CausalMixin

    right = CausalMixin.build_head

    def wrong(self: Any, *args: Any) -> None:
        right(self, *args)
        assert self.logits_processor.soft_cap
        self.logits_processor.soft_cap = None

    CausalMixin.build_head = wrong


def _permuted_experts() -> None:
    """Each expert has the weights of its neighbour; the router stays."""

    def change(placement: Any, tensor: Any) -> tuple[Any, Any]:
        of_experts = placement.target.endswith(("w13_weight", "w2_weight"))
        assert tensor.dim() == 3 or not of_experts, placement
        return placement, tensor.roll(1, dims=0) if of_experts else tensor

    _before_placing(change)


def _dead_engine() -> None:
    """No fault of the list: the process dies while the model is built."""
    from tfbackend.mixins.causal import CausalMixin

    def die(self: Any, *args: Any) -> None:
        print("about to die", flush=True)
        os.abort()

    CausalMixin.build_head = die


def _not_a_number() -> None:
    def change(model: Any) -> None:
        model.model.layers[1].mlp.down_proj.weight[0, 0] = float("nan")

    _after_loading(change)


def _dropped_pooler() -> None:
    """What is between the first token and the classifier passes it on as it is."""
    import torch

    def change(model: Any) -> None:
        pooler = model.model.pooler
        pooler.dense.weight.copy_(torch.eye(len(pooler.dense.weight)))
        pooler.dense.bias.zero_()
        pooler.activation.forward = lambda x: x

    _after_loading(change)


def _wrong_pooling_position() -> None:
    from vllm.model_executor.layers.pooler.seqwise import get_seq_pooling_method

    from tfbackend.mixins import pooling

    pooling.pooling_of = lambda plan: get_seq_pooling_method("LAST" if plan.pick == "first" else "CLS")


def _padding_is_a_token() -> None:
    """The last token of a text is read, also where that is padding."""
    from tfbackend.mixins import pooling

    pooling.last_real = lambda ids, padding: len(ids) - 1


def _types_off() -> None:
    """All tokens are of type 0."""
    from tfbackend.mixins.pooling import PoolingMixin

    right = PoolingMixin.forward

    def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
        return right(self, *args, **(kwargs | {"token_type_ids": None}))

    PoolingMixin.forward = wrong


def _dropped_classifier_bias() -> None:
    _after_loading(lambda model: model.head.classifier.bias.zero_())


def _nan_in_classifier() -> None:
    """In what no module of the tree calls: only the answers show it."""
    _after_loading(lambda model: model.head.classifier.weight.fill_(float("nan")))


def _wrong_mode() -> None:
    from tfbackend.mixins.sentence import SentencePool

    right = SentencePool.__init__
    SentencePool.__init__ = lambda self, modes: right(self, ("cls",) * len(modes))


def _dropped_module() -> None:
    """The last module of a folder, before vectors are made as long as one."""
    from tfbackend.mixins import sentence

    right = sentence.build_steps
    sentence.build_steps = lambda steps, weights_of: right(steps[:-1], weights_of)


def _texts_pooled_together() -> None:
    """The vector of each text of a call is that of all."""
    from tfbackend.mixins.sentence import SentencePool

    right = SentencePool.forward

    def wrong(self: Any, *args: Any) -> Any:
        vectors = right(self, *args)
        return vectors.mean(0, keepdim=True).expand_as(vectors)

    SentencePool.forward = wrong


def _swapped_labels() -> None:
    """A language model that ranks takes the token for no for that for yes."""
    from tfbackend.reranker import Reranker

    right = Reranker.rows
    Reranker.rows = lambda self, head, ids: right(self, head, ids[::-1])


FAULTS: dict[str, Callable[[], None]] = {
    "swapped q/k": _swapped_qk,
    "wrong scale": _wrong_scale,
    "dropped bias": _dropped_bias,
    "rotated rope": _rotated_rope,
    "off-by-one window": _off_by_one_window,
    "sink ignored": _sink_ignored,
    "tied head not tied": _untied_head,
    "head never tied": _head_never_tied,
    "state leaked between requests": _leaked_state,
    "wrong shard on rank 1": _wrong_shard,
    "hidden states lost between stages": _lost_between_stages,
    "attention soft cap dropped": _dropped_attention_cap,
    "logits soft cap dropped": _dropped_logits_cap,
    "expert order permuted": _permuted_experts,
    "dead engine": _dead_engine,
    "not a number": _not_a_number,
    "pooler dropped": _dropped_pooler,
    "wrong pooling position": _wrong_pooling_position,
    "padding taken for a token": _padding_is_a_token,
    "types off": _types_off,
    "classifier bias dropped": _dropped_classifier_bias,
    "not a number in the classifier": _nan_in_classifier,
    "wrong mode of pooling": _wrong_mode,
    "module of a folder dropped": _dropped_module,
    "texts pooled together": _texts_pooled_together,
    "labels swapped": _swapped_labels,
}
