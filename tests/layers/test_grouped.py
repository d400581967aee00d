"""A stack of linears by groups of rows equals row-by-row products, on every way that a device may take."""

import pytest
import torch

from tests.layers.variants import close, context
from tfbackend.groupedspec import GroupedLinearSpec
from tfbackend.layers.build import build_layer
from tfbackend.layers.grouped import _by_mask

SIZES = ([2, 0, 5, 1], [0, 0, 0, 3], [4, 0, 0, 0], [0, 1, 1, 0])


def case(transposed, sizes):
    generator = torch.Generator().manual_seed(5)
    spec = GroupedLinearSpec(4, 24, 40, transposed)
    weight = torch.randn(spec.shape, generator=generator) * 0.2
    x = torch.randn(sum(sizes), 24, generator=generator)
    reference = spec.reference()
    reference.weight = weight
    return spec, weight, x, torch.tensor(sizes), reference(x, torch.tensor(sizes))


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("transposed", [False, True])
def test_equals_its_reference(transposed, sizes):
    spec, weight, x, counts, wanted = case(transposed, sizes)
    layer = build_layer(spec, "model.layers.0.first", context(torch.float32), torch.nn.Module())
    layer.weight.data.copy_(weight)
    close(layer(x, counts), wanted)
    close(_by_mask(x, weight, counts.cumsum(0), transposed), wanted)


def test_traces_as_one_operation():
    spec, weight, x, counts, wanted = case(False, SIZES[0])
    layer = build_layer(spec, "model.layers.0.first", context(torch.float32), torch.nn.Module())
    layer.weight.data.copy_(weight)
    compiled = torch.compile(layer, fullgraph=True, backend="eager", dynamic=True)
    with torch.no_grad():
        close(compiled(x, counts), wanted)
