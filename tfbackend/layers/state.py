"""The layer that keeps the state of each request and runs a mixer of Transformers with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport
from vllm.v1.attention.backends.mamba_attn import BaseMambaAttentionMetadata, BaseMambaAttentionMetadataBuilder
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from tfbackend.graph.statecache import advance, beginning, run_alone, tensors_of
from tfbackend.statespec import StateSpec


@dataclass
class StateMetadata(BaseMambaAttentionMetadata):
    """Which rows of a step belong to which request, those that decode first."""


class StateMetadataBuilder(BaseMambaAttentionMetadataBuilder[StateMetadata]):
    """A mixer runs in plain torch, request by request where it prefills, which no CUDA graph can hold."""

    metadata_cls = StateMetadata
    needs_causal_conv1d_metadata = False
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER


class StateBackend(AttentionBackend):
    """What vLLM asks for the metadata of these layers; plugin.py names it to vLLM."""

    @staticmethod
    def get_name() -> str:
        return "TFBACKEND_STATE"

    @staticmethod
    def get_builder_cls() -> type[StateMetadataBuilder]:
        return StateMetadataBuilder

    @classmethod
    def is_ssm(cls) -> bool:
        return True


class StateLayer(nn.Module, MambaBase):
    """Runs `mixer`, of which it is a child, over the tokens of a step, each request with its own state.

    To vLLM the state of a request is one row of bytes, which it allocates, copies and shares out; only this layer
    knows what lies where in it. Every rank keeps and computes the whole.
    """

    mixer: nn.Module
    run: Callable[..., Any]

    def __init__(self, spec: StateSpec, prefix: str, mixer: nn.Module) -> None:
        super().__init__()
        self.spec, self.prefix = spec, prefix
        # Not a child of its own child, and run by the forward that its class has now, before it is rewritten.
        self.__dict__.update(mixer=mixer, run=type(mixer).forward)
        known = get_current_vllm_config().compilation_config.static_forward_context
        if prefix in known:
            raise ValueError(f"Duplicate layer name: {prefix}")
        known[prefix] = self
        self.kv_cache: tuple[torch.Tensor, ...] = (torch.tensor([]),)
        self.states: list[torch.Tensor] = []

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return ((self.spec.nbytes,),)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return (torch.int8,)

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        return MambaAttentionBackendEnum.CUSTOM

    @property
    def is_kv_cache_tp_replicated(self) -> bool:
        return True

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        """Take [pages, 1, 1, bytes] of int8, and see each page's states in it."""
        super().bind_kv_cache(kv_cache)
        self.states = []
        for state, begin in zip(self.spec.states, self.spec.offsets, strict=True):
            rows = self.kv_cache[0][:, begin : begin + state.nbytes].view(state.dtype)
            self.states.append(rows.view(len(rows), *state.shape))

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor | None = None) -> Any:
        """[1, tokens, width], positions [1, tokens] where the mixer takes them -> what it returns for them."""
        tokens, spec = hidden.shape[1], self.spec
        output = hidden.new_empty((tokens, sum(spec.widths)))
        places = None if positions is None else positions.squeeze(0)
        torch.ops.vllm.tfbackend_state(hidden.squeeze(0), output, self.prefix, places)
        parts = iter(torch.split(output, [*spec.widths], dim=-1))
        made = [None if shape is None else next(parts).reshape(1, tokens, *shape) for shape in spec.outputs]
        return tuple(made) if spec.tupled else made[0]

    def serve(self, hidden: torch.Tensor, output: torch.Tensor, positions: torch.Tensor | None) -> None:
        """[tokens, width], [tokens] -> output [tokens, widths]. Rows that are no request's become zeros."""
        known = get_forward_context().attn_metadata
        metadata = known.get(self.prefix) if isinstance(known, dict) else None
        if metadata is None:
            self._measure(hidden, output, positions)
            return
        assert isinstance(metadata, StateMetadata), type(metadata)
        decoded = metadata.num_decode_tokens
        if decoded:
            self._decode(hidden[:decoded], output[:decoded], positions, metadata)
        if metadata.num_prefills:
            self._prefill(hidden, output, positions, metadata)
        output[decoded + metadata.num_prefill_tokens :].zero_()

    def _decode(
        self, hidden: torch.Tensor, output: torch.Tensor, positions: torch.Tensor | None, metadata: StateMetadata
    ) -> None:
        """One token of each of several requests."""
        assert metadata.state_indices_tensor_d is not None
        slots = metadata.state_indices_tensor_d[: len(hidden), 0].long()
        size = 1 if self.spec.separate else len(hidden)
        for at in range(0, len(hidden), size):
            rows = slice(at, at + size)
            places = None if positions is None else positions[rows].unsqueeze(1)
            self._write(output[rows], self._step(hidden[rows].unsqueeze(1), slots[rows], places, fresh=False))

    def _prefill(
        self, hidden: torch.Tensor, output: torch.Tensor, positions: torch.Tensor | None, metadata: StateMetadata
    ) -> None:
        begins, slots, begun = (
            metadata.query_start_loc_p,
            metadata.state_indices_tensor_p,
            metadata.has_initial_states_p,
        )
        assert begins is not None and slots is not None and begun is not None
        bounds = [metadata.num_decode_tokens + begin for begin in begins.tolist()]
        for index, continued in enumerate(begun.tolist()):
            start, end, slot = bounds[index], bounds[index + 1], slots[index : index + 1].long()
            stride = 1 if continued and self.spec.stepwise else end - start
            for at in range(start, end, stride or 1):
                rows = slice(at, at + stride)
                places = None if positions is None else positions[rows].unsqueeze(0)
                self._write(output[rows], self._step(hidden[rows].unsqueeze(0), slot, places, fresh=not continued))

    def _step(
        self, hidden: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor | None, *, fresh: bool
    ) -> list[torch.Tensor]:
        """[requests, tokens, width] of the requests whose states lie in `slots`, whatever those held if `fresh`."""
        if fresh:
            states = beginning(self.spec, len(slots), hidden.device)
        else:
            states = [page.index_select(0, slots) for page in self.states]
        output, after = advance(self.run, self.mixer, self.spec, hidden, states, positions, fresh=fresh)
        for page, state in zip(self.states, after, strict=True):
            page.index_copy_(0, slots, state.to(page.dtype))
        return tensors_of(output, self.spec)

    def _write(self, output: torch.Tensor, made: Sequence[torch.Tensor]) -> None:
        torch.cat([x.reshape(-1, math.prod(x.shape[2:])) for x in made], dim=-1, out=output)

    def _measure(self, hidden: torch.Tensor, output: torch.Tensor, positions: torch.Tensor | None) -> None:
        """A step without requests, by which vLLM measures memory; on a CPU it does not, and a long scan takes long."""
        if hidden.device.type == "cpu":
            output.zero_()
            return
        places = None if positions is None else positions.unsqueeze(0)
        made = run_alone(self.run, self.mixer, self.spec, hidden.unsqueeze(0), places)
        self._write(output, tensors_of(made, self.spec))


@eager_break_during_capture  # type: ignore[untyped-decorator]
def tfbackend_state(
    hidden: torch.Tensor, output: torch.Tensor, layer_name: str, positions: torch.Tensor | None = None
) -> None:
    """Run the state layer of that name; opaque to torch.compile, for it branches on the requests of a step."""
    layer = get_forward_context().no_compile_layers[layer_name]
    assert isinstance(layer, StateLayer)
    layer.serve(hidden, output, positions)


direct_register_custom_op(op_name="tfbackend_state", op_func=tfbackend_state, mutates_args=["output"])
