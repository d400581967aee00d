"""What stands on a pipeline stage for the layers of others."""

import pytest
import torch
from torch import nn

pytest.importorskip("vllm")

from tfbackend.errors import UnsupportedModelError
from tfbackend.graph.stages import Stages
from tfbackend.layers.stages import AbsentEmbedding, AbsentLayer, Stage, check_shared, leave_out

PLAN = Stages("layers", count=4, width=3, returned=(0, 0, 0, 0))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.kind = "window"
        self.linear = nn.Linear(3, 3)

    def forward(self, hidden):
        return self.linear(hidden)


def model():
    made = nn.Module()
    made.embed = nn.Embedding(5, 3, dtype=torch.float64)
    made.layers = nn.ModuleList(Layer() for _ in range(4))
    return made


@pytest.mark.parametrize(
    ("start", "stop", "absent", "follows"),
    [
        (0, 2, ("layers.2", "layers.3"), True),
        (1, 3, ("layers.0", "layers.3"), True),
        (2, 4, ("layers.0", "layers.1"), False),
    ],
)
def test_what_a_stage_has(start, stop, absent, follows):
    stage = Stage(PLAN, start, stop)
    assert (stage.absent, stage.follows) == (absent, follows)
    assert stage.has("embed")
    assert [stage.has(f"layers.{n}.linear") for n in range(4)] == [start <= n < stop for n in range(4)]


def test_names_that_begin_alike():
    """Layer 10 is not in layer 1."""
    stage = Stage(Stages("layers", count=12, width=3, returned=(0,) * 12), 2, 12)
    assert not stage.has("layers.1")
    assert stage.has("layers.10.linear")


def test_leaving_out():
    made = model()
    kept = made.layers[2]
    leave_out(made, Stage(PLAN, 2, 4, "embed"))
    assert made.layers[2] is kept
    assert [type(layer) for layer in made.layers] == [AbsentLayer, AbsentLayer, Layer, Layer]
    assert {name.partition(".")[0] for name, _ in made.named_parameters()} == {"layers"}
    assert made.layers[0].kind == "window"
    rows = made.embed(torch.zeros(1, 2, dtype=torch.long))
    assert isinstance(made.embed, AbsentEmbedding)
    assert (rows.shape, rows.dtype) == ((1, 2, 3), torch.float64)


@pytest.mark.parametrize(("returned", "keywords"), [(0, {}), (2, {}), (2, {"hidden_states": True})])
def test_handing_on(returned, keywords):
    given, received = torch.ones(1, 2, 3), torch.full((1, 2, 3), 7.0)
    layer = AbsentLayer(Layer(), returned)

    def call():
        return layer(**dict.fromkeys(keywords, given)) if keywords else layer(given, 5)

    def first(output):
        assert isinstance(output, tuple) == bool(returned)
        return output[0] if returned else output

    assert first(call()) is given
    assert layer.tfb_given is given
    layer.tfb_received = received
    assert first(call()) is received
    assert layer.tfb_given is given


def test_weights_of_another_stage_are_refused_by_name():
    stage = Stage(PLAN, 2, 4)
    check_shared([("model.layers.3.w", "model.layers.2.w"), ("model.layers.1.w", "model.layers.0.w")], stage, "model")
    check_shared([("model.layers.3.w", "model.layers.0.w")], None, "model")
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.3\.w.*model\.layers\.0\.w"):
        check_shared([("model.layers.3.w", "model.layers.0.w")], stage, "model")
