"""One of two ranks that share experts, some of them copied, and exchange them: run by test_balancing.py.

    python -m tests.balancing_rank RANK RENDEZVOUS

Prints what it found as JSON. vLLM balances experts on GPUs only; its code that moves them runs here over gloo.
"""

import dataclasses
import json
import sys

import torch
from torch import distributed, nn
from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import get_ep_group, init_distributed_environment, initialize_model_parallel
from vllm.distributed.eplb.eplb_communicator import EplbCommunicator
from vllm.distributed.eplb.eplb_state import EplbState
from vllm.distributed.eplb.rebalance_execute import rearrange_expert_weights_inplace

from tests.layers.variants import context
from tfbackend.expertspec import ExpertsSpec
from tfbackend.layers.build import build_layer
from tfbackend.mixins.moe import MoEMixin
from tfbackend.moespec import MoESpec, RouterSpec

EXPERTS, COPIES, HIDDEN, INNER, LAYERS = 6, 2, 64, 32, 2


class OverGloo(EplbCommunicator):
    """Sends and receives when asked to execute, like vLLM's own, without a GPU to wait for."""

    def __init__(self, group):
        self.group, self.operations = group, []

    def add_send(self, tensors, dst_rank, expert_id):
        self.operations += [
            distributed.P2POp(distributed.isend, t, group=self.group, group_peer=dst_rank) for t in tensors
        ]

    def add_recv(self, tensors, src_rank, expert_id):
        self.operations += [
            distributed.P2POp(distributed.irecv, t, group=self.group, group_peer=src_rank) for t in tensors
        ]

    def execute(self):
        if self.operations:
            for request in distributed.batch_isend_irecv(self.operations):
                request.wait()
        self.operations = []


class Model(MoEMixin):
    """Only what load balancing asks of a model."""

    def __init__(self, layers):
        nn.Module.__init__(self)
        self.model = nn.ModuleList(layers)
        self.count_experts(self.model)


def weights(layer, name):
    """As a checkpoint has them: [experts, ...], each filled with its own number."""
    shape = {"w13_weight": (2 * INNER, HIDDEN), "w2_weight": (HIDDEN, INNER)}[name]
    numbers = torch.arange(EXPERTS, dtype=torch.float32) + 100 * layer
    return numbers[:, None, None].expand(EXPERTS, *shape).contiguous()


def build():
    spec = ExpertsSpec(EXPERTS, 2, HIDDEN, INNER)
    kinds = [MoESpec(spec, RouterSpec("sigmoid", correction=True)), spec]
    around = dataclasses.replace(context(torch.float32), tp_size=2, eplb=True, redundant_experts=COPIES)
    layers = [build_layer(kind, f"model.layers.{n}.mlp.moe", around, nn.Module()) for n, kind in enumerate(kinds)]
    for number, layer in enumerate(layers):
        for name in ("w13_weight", "w2_weight"):
            parameter = getattr(layer.runner.routed_experts, name)
            parameter.weight_loader(parameter, weights(number, name))
    return Model(layers)


def held(model):
    """Which expert each slot of this rank holds, by layer and tensor; -1 where it is not one whole expert."""
    return [
        [[int(row.flatten()[0]) if row.unique().numel() == 1 else -1 for row in tensor] for tensor in layer]
        for layer in model.expert_weights
    ]


def main():
    rank, rendezvous = int(sys.argv[1]), sys.argv[2]
    config = VllmConfig(parallel_config=ParallelConfig(tensor_parallel_size=2, enable_expert_parallel=True))
    with set_current_vllm_config(config):
        init_distributed_environment(2, rank, f"file://{rendezvous}", rank, "gloo")
        initialize_model_parallel(2)
        model = build()
        first = EplbState.build_initial_global_physical_to_logical_map(EXPERTS, COPIES)
        model.set_eplb_state(*(torch.zeros(LAYERS, EXPERTS + COPIES, dtype=torch.int32) for _ in range(3)))
        before = held(model)
        moved = [[5, 1, 1, 4, 3, 2, 0, 1], [0, 1, 2, 3, 4, 5, 5, 5]]
        group = get_ep_group().device_group
        buffers = [torch.empty_like(tensor) for tensor in model.expert_weights[0]]
        old = torch.tensor([first] * LAYERS)
        rearrange_expert_weights_inplace(
            old, torch.tensor(moved), model.expert_weights, buffers, group, OverGloo(group)
        )
        counts = {name: getattr(model, f"num_{name}") for name in COUNTS}
        print(json.dumps({"first": first, "moved": moved, "before": before, "after": held(model), **counts}))


COUNTS = (
    *("moe_layers", "logical_experts", "routed_experts", "physical_experts"),
    *("local_physical_experts", "redundant_experts"),
)

if __name__ == "__main__":
    main()
