"""Pooling as sentence-transformers describes it in a folder's files."""

import pytest
import torch

from tfbackend.errors import CheckpointError, UnsupportedModelError
from tfbackend.sentence import MODES, build_steps, module_names, pool, pooling_modes, sentence_plan

X = torch.tensor([[1.0, 8.0], [2.0, -4.0], [6.0, 2.0], [3.0, 2.0]])


def listed(*names):
    return [{"type": f"sentence_transformers.models.{name}"} for name in names]


@pytest.mark.parametrize(
    "more",
    [
        ("Pooling",),
        ("Pooling", "Dense", "Dense", "Normalize"),
        ("Pooling", "Normalize", "Dense"),
        ("Pooling", "Dense", "LayerNorm", "Dense"),
        ("Dense",),
        ("Dense", "MultiVectorMask", "Normalize"),
    ],
)
def test_modules_that_can_be_done(more):
    names = ("Transformer", *more)
    assert module_names(listed(*names)) == [*names]


@pytest.mark.parametrize(
    "names",
    [
        ("Transformer",),
        ("Pooling", "Dense"),
        ("Transformer", "Pooling", "MultiVectorMask"),
        ("Transformer", "Pooling", "CNN"),
        ("Transformer", "Dense", "Pooling"),
        ("Transformer", "Pooling", "Pooling"),
        ("Transformer", "WeightedLayerPooling", "Pooling"),
    ],
)
def test_other_modules_are_refused(names):
    with pytest.raises(UnsupportedModelError, match="after the model"):
        module_names(listed(*names))


@pytest.mark.parametrize(
    ("config", "modes"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, ("cls",)),
        ({"pooling_mode_mean_sqrt_len_tokens": True, "word_embedding_dimension": 8}, ("mean_sqrt_len_tokens",)),
        ({"pooling_mode_weightedmean_tokens": True, "include_prompt": True}, ("weightedmean",)),
        ({"pooling_mode_lasttoken": True, "pooling_mode_max_tokens": True}, ("max", "lasttoken")),
        ({"pooling_mode": "mean"}, ("mean",)),
        ({"pooling_mode": ["lasttoken", "cls"]}, ("cls", "lasttoken")),
    ],
)
def test_modes(config, modes):
    assert pooling_modes(config) == modes


@pytest.mark.parametrize(
    "config",
    [{}, {"pooling_mode_median": True}, {"pooling_mode": "mean", "include_prompt": False}, {"pooling_mode": "median"}],
)
def test_other_modes_are_refused(config):
    with pytest.raises(UnsupportedModelError, match="Pooling of sentence-transformers"):
        pooling_modes(config)


GIVEN = [
    ("cls", [1.0, 8.0]),
    ("max", [6.0, 8.0]),
    ("mean", [3.0, 2.0]),
    ("mean_sqrt_len_tokens", [6.0, 4.0]),
    ("weightedmean", [(1 + 4 + 18 + 12) / 10, (8 - 8 + 6 + 8) / 10]),
    ("lasttoken", [3.0, 2.0]),
]


@pytest.mark.parametrize(("mode", "wanted"), GIVEN)
def test_what_each_mode_gives(mode, wanted):
    assert pool(mode, X).tolist() == pytest.approx(wanted)
    assert pool(mode, X.bfloat16()).dtype == torch.float32


def test_every_mode_is_tried_here():
    assert {mode for mode, _ in GIVEN} == MODES.keys()


MEAN = {"pooling_mode_mean_tokens": True}
DENSE = {"in_features": 2, "out_features": 3, "activation_function": "torch.nn.modules.activation.Tanh"}
TOKENS = {"module_input_name": "token_embeddings"}


def plan_of(modules, said=None):
    """The plan of a folder whose modules have these configs."""
    files = {f"{name}/config.json": config for name, config in modules.items()}
    files["modules.json"] = [{"type": f"a.b.{name}", "path": name} for name in modules]
    return sentence_plan((files | {"config_sentence_transformers.json": said}).get)


def test_other_folders_have_no_plan():
    assert sentence_plan(lambda name: None) is None


@pytest.mark.parametrize(
    ("modules", "said", "modes", "steps", "normalised"),
    [
        ({"Pooling": MEAN}, None, ("mean",), [], False),
        ({"Pooling": MEAN, "Normalize": {}}, None, ("mean",), [], True),
        ({"Pooling": MEAN, "Dense": DENSE, "LayerNorm": {}}, None, ("mean",), ["Dense", "LayerNorm"], False),
        ({"Pooling": MEAN, "Normalize": {}, "Dense": DENSE}, None, ("mean",), ["Normalize", "Dense"], False),
        ({"Dense": DENSE | TOKENS}, None, (), ["Dense"], False),
        ({"Dense": DENSE | TOKENS, "Normalize": TOKENS}, None, (), ["Dense"], True),
        ({"Dense": DENSE}, {"model_type": "ColBERT"}, (), ["Dense"], True),
    ],
)
def test_plans(modules, said, modes, steps, normalised):
    plan = plan_of({"Transformer": {}} | modules, said)
    assert (plan.modes, [step.name for step in plan.steps], plan.normalised) == (modes, steps, normalised)


@pytest.mark.parametrize(
    "modules",
    [
        {"Pooling": MEAN, "Dense": DENSE | TOKENS},  # what it reads is not what is given
        {"Pooling": MEAN, "Dense": DENSE | {"module_output_name": "more"}},
        {"Dense": DENSE | {"module_input_name": "sentence_embedding"}},
        {"Dense": DENSE, "Normalize": {}},  # of a text, which there is none of
        {"Dense": DENSE | TOKENS, "LayerNorm": {"dimension": 3}},
    ],
)
def test_modules_that_read_something_else_are_refused(modules):
    with pytest.raises(UnsupportedModelError, match="reads or writes something else"):
        plan_of({"Transformer": {}} | modules)


def test_activations_of_others_are_refused():
    with pytest.raises(UnsupportedModelError, match="not torch's"):
        plan_of({"Transformer": {}, "Pooling": MEAN, "Dense": DENSE | {"activation_function": "os.getcwd"}})


RANDOM = torch.Generator().manual_seed(4)
LINEAR = {"linear.weight": torch.randn(3, 2, generator=RANDOM), "linear.bias": torch.randn(3, generator=RANDOM)}
RESIDUAL = {"residual.weight": torch.randn(3, 2, generator=RANDOM)}
NORM = {"norm.weight": torch.randn(3, generator=RANDOM), "norm.bias": torch.randn(3, generator=RANDOM)}


def built(tensors, **fields):
    plan = plan_of({"Transformer": {}, "Pooling": MEAN, "Dense": DENSE | fields, "LayerNorm": {"dimension": 3}})
    return build_steps(plan.steps, {"Dense": tensors, "LayerNorm": NORM}.get)


@pytest.mark.parametrize("adds", [False, True])
def test_steps_do_what_torch_does(adds):
    y = torch.tanh(X @ LINEAR["linear.weight"].T + LINEAR["linear.bias"])
    y = y + X @ RESIDUAL["residual.weight"].T if adds else y
    wanted = torch.nn.functional.layer_norm(y, (3,), NORM["norm.weight"], NORM["norm.bias"])
    steps = built(LINEAR | (RESIDUAL if adds else {}), use_residual=adds)
    assert torch.allclose(steps(X), wanted, atol=1e-6)


def test_no_steps():
    assert build_steps((), {}.get) is None


@pytest.mark.parametrize(
    "tensors",
    [None, {}, {"linear.weight": LINEAR["linear.weight"]}, LINEAR | RESIDUAL, LINEAR | {"linear.bias": torch.ones(2)}],
)
def test_weights_that_do_not_fit_are_refused(tensors):
    with pytest.raises(CheckpointError, match="do not fit"):
        built(tensors)
