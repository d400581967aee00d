"""What a head class does between hidden states and logits, kept whole or refused by name."""

from types import SimpleNamespace

import pytest
import torch
from accelerate import init_empty_weights
from torch import nn

from tests.sites import WIDTH, OneSite
from tfbackend.errors import UnsupportedModelError
from tfbackend.graph.observe import observe
from tfbackend.head import HeadPlan, plan_head, runnable

VOCABULARY = 50


class Head(nn.Module):
    """Logits as they come; the variations say what they do to hidden states `h` or logits."""

    def __init__(self, bias=False):
        super().__init__()
        self.model = OneSite([nn.Identity()])
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=bias)
        self.norm = nn.LayerNorm(WIDTH)
        self.extra = nn.Linear(WIDTH, WIDTH)

    def forward(self, input_ids, position_ids=None, use_cache=None, logits_to_keep=0):
        h = self.model(input_ids, position_ids=position_ids)
        keep = slice(-logits_to_keep, None) if logits_to_keep else slice(0, None)
        return {"logits": self.logits(h[:, keep, :], input_ids)}

    def logits(self, h, ids):
        return self.lm_head(h)


def variation(logits, **attributes):
    return type("Variation", (Head,), {"logits": logits, **attributes})


def read(cls, **kwargs) -> tuple[HeadPlan, nn.Module]:
    with init_empty_weights(include_buffers=False):
        model = cls(**kwargs).eval()
    meta = SimpleNamespace(model=model, base_path="model", head_path="lm_head")
    return plan_head(meta, observe(model.model)), model


def test_plain_head():
    for bias in (False, True):
        plan, _ = read(Head, bias=bias)
        assert (plan.before, plan.after, plan.soft_cap, plan.scale, plan.modules) == (None, None, None, 1.0, ())
        assert str(plan) == "plain"


@pytest.mark.parametrize(
    ("logits", "soft_cap", "scale"),
    [
        (lambda self, h, ids: self.lm_head(h) * 0.25, None, 0.25),
        (lambda self, h, ids: 0.25 * self.lm_head(h), None, 0.25),
        (lambda self, h, ids: self.lm_head(h) / 4, None, 0.25),
        (lambda self, h, ids: self.lm_head(h).float() / 4 * 3, None, 0.75),
        (lambda self, h, ids: torch.tanh(self.lm_head(h) / 3) * 3, 3.0, 1.0),
        (lambda self, h, ids: 3 * torch.tanh(self.lm_head(h).float() / 3), 3.0, 1.0),
        (lambda self, h, ids: torch.tanh(self.lm_head(h) / 3) * 3 * 0.5, 3.0, 0.5),
    ],
)
def test_scale_and_soft_cap_become_numbers(logits, soft_cap, scale):
    """vLLM caps first and scales then; only that order may be told in numbers."""
    plan, _ = read(variation(logits))
    assert plan.after is None
    assert plan.soft_cap == soft_cap
    assert plan.scale == pytest.approx(scale)


@pytest.mark.parametrize(
    "logits",
    [
        lambda self, h, ids: torch.tanh(self.lm_head(h) * 0.5 / 3) * 3,  # scaled before the cap
        lambda self, h, ids: torch.tanh(self.lm_head(h) / 3) * 2,  # cap and bound differ
        lambda self, h, ids: torch.tanh(self.lm_head(h)),
        lambda self, h, ids: 4 / self.lm_head(h),
        lambda self, h, ids: self.lm_head(h) + 1,
        lambda self, h, ids: self.lm_head(h).log_softmax(-1),
        lambda self, h, ids: self.lm_head(h)[..., :40],
    ],
)
def test_all_else_after_the_head_is_kept_as_a_graph(logits):
    cls = variation(logits)
    plan, _ = read(cls)
    assert (plan.soft_cap, plan.scale) == (None, 1.0)
    x = torch.randn(1, 3, VOCABULARY)
    model = cls()
    model.lm_head = nn.Identity()
    torch.testing.assert_close(runnable(plan.after, model)(x), model.logits(x, None))


@pytest.mark.parametrize(
    ("logits", "modules"),
    [
        (lambda self, h, ids: self.lm_head(h * 0.3), ()),
        (lambda self, h, ids: self.lm_head(h / self.model.embed.weight.shape[1]), ()),
        (lambda self, h, ids: self.lm_head(self.norm(h)), ("norm",)),
        (lambda self, h, ids: self.lm_head(self.extra(self.norm(h)).relu() + h), ("extra", "norm")),
        (lambda self, h, ids: self.lm_head(h * self.extra.bias), ("extra.bias",)),
    ],
)
def test_what_comes_before_the_head_is_kept_as_a_graph(logits, modules):
    cls = variation(logits)
    plan, _ = read(cls)
    assert plan.after is None
    assert plan.modules == modules
    model = cls()
    x = torch.randn(1, 3, WIDTH)
    got = runnable(plan.before, model)(x)
    torch.testing.assert_close(model.lm_head(got), model.logits(x, None))


class Quiet(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 0.5


def _other_head(self, h, ids):
    return self.lm_head(h)


@pytest.mark.parametrize(
    ("logits", "reason"),
    [
        (lambda self, h, ids: self.lm_head(h) + ids[..., None], "the logits depend on input_"),
        (lambda self, h, ids: self.lm_head(h) + self.lm_head(h), "calls lm_head 2 times"),
        (lambda self, h, ids: h @ self.lm_head.weight.T, "calls lm_head 0 times"),
        (lambda self, h, ids: self.lm_head(input=h), "calls lm_head with keywords"),
        (lambda self, h, ids: self.lm_head(h - h.mean(1, keepdim=True)), "depend on which others are asked for"),
        (lambda self, h, ids: self.lm_head(h[:, -1:]), "depend on which others are asked for"),
        (lambda self, h, ids: self.lm_head(h).cumsum(1), "depend on which others are asked for"),
        (lambda self, h, ids: self.lm_head(h.view(7, -1)).view(1, 7, -1), "counts tokens"),
        (lambda self, h, ids: self.lm_head(h) * (2 if h.sum().item() > 0 else 1), "traced only in part"),
    ],
)
def test_heads_that_depend_on_more_are_refused(logits, reason):
    with pytest.raises(UnsupportedModelError, match=reason):
        read(variation(logits))


def test_linear_with_a_forward_of_its_own_is_refused():
    class Own(Head):
        def __init__(self):
            super().__init__()
            self.lm_head = Quiet(WIDTH, VOCABULARY)

    with pytest.raises(UnsupportedModelError, match="lm_head is a Quiet"):
        read(Own)


def test_second_output_of_the_base_model_is_not_the_first():
    class Pair(OneSite):
        def forward(self, input_ids, position_ids=None, use_cache=None):
            h = super().forward(input_ids)
            return h, h * 2

    class Second(Head):
        def __init__(self):
            super().__init__()
            self.model = Pair([nn.Identity()])

        def forward(self, input_ids, position_ids=None, use_cache=None):
            return {"logits": self.lm_head(self.model(input_ids)[1])}

    with pytest.raises(UnsupportedModelError, match="depend on input_"):
        read(Second)
