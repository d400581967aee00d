"""In bfloat16 the norms round where Transformers' own round: small models change their answers if they do not."""

import pytest
import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tests.layers.variants import context
from tfbackend.layers.build import build_layer
from tfbackend.layerspecs import NormSpec

SIZE, EPS = 576, 1e-5

PAIRS = {
    "rms": (NormSpec("rms", SIZE, EPS), lambda: LlamaRMSNorm(SIZE, EPS)),
    "zero-centred rms": (NormSpec("rms", SIZE, EPS, "zero_centred"), lambda: Gemma2RMSNorm(SIZE, EPS)),
    "layer": (NormSpec("layer", SIZE, EPS, "plain", True), lambda: nn.LayerNorm(SIZE, EPS)),
}


@torch.no_grad()
@pytest.mark.parametrize("name", PAIRS)
def test_rounds_where_transformers_rounds(name):
    spec, make = PAIRS[name]
    torch.manual_seed(11)
    original = make().bfloat16()
    for parameter in original.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.3)
    torch.set_default_dtype(torch.bfloat16)
    try:
        layer = build_layer(spec, "model.norm", context(torch.bfloat16), nn.Module())
    finally:
        torch.set_default_dtype(torch.float32)
    layer.load_state_dict(original.state_dict())
    x = (torch.randn(200, SIZE) * 2).bfloat16()
    same = (layer(x) == original(x)).float().mean().item()
    # Sums in another order move a value over the edge of its rounding now and then; rounding elsewhere moves a quarter.
    assert same > 0.999, f"{same:.2%} of the values are Transformers'"
