"""A whole mixture-of-experts block, router and shared expert included, as frozen data; see layerspecs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tfbackend.expertspec import ExpertsSpec

SCORINGS = ("softmax", "sigmoid")


@dataclass(frozen=True)
class RouterSpec:
    """How the logits of all experts become the ids and weights of each token's.

    Attributes:
        scoring: one of SCORINGS, applied to the logits.
        renormalize: whether a token's weights are made to add up to 1.
        groups, groups_used: experts are divided into `groups` of equal size, of which each token may use `groups_used`;
            a group is judged by its best expert, or by its best two where there is a correction.
        scale: multiplies the weights, after renormalising.
        bias: whether the logits have one.
        correction: whether a vector is added to the scores for the choice, but not for the weights.
        wide: whether the logits are computed in float32 whatever the dtype of the model.
    """

    scoring: str = "softmax"
    renormalize: bool = True
    groups: int = 1
    groups_used: int = 1
    scale: float = 1.0
    bias: bool = False
    correction: bool = False
    wide: bool = False

    def route(
        self, logits: torch.Tensor, top_k: int, correction: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and ids [tokens, top_k] for logits [tokens, experts]."""
        logits = logits if logits.dtype == torch.float64 else logits.float()
        scores = logits.softmax(-1) if self.scoring == "softmax" else logits.sigmoid()
        choice = scores if correction is None else scores + correction
        if self.groups > 1:
            choice = self._within_groups(choice, corrected=correction is not None)
        ids = choice.topk(top_k, dim=-1).indices
        weights = scores.gather(-1, ids)
        if self.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights * self.scale, ids

    def _within_groups(self, choice: torch.Tensor, *, corrected: bool) -> torch.Tensor:
        members = choice.view(*choice.shape[:-1], self.groups, -1)
        merit = members.topk(2, dim=-1).values.sum(-1) if corrected else members.amax(-1)
        barred = torch.ones_like(merit, dtype=torch.bool)
        barred = barred.scatter(-1, merit.topk(self.groups_used, dim=-1).indices, False)
        return members.masked_fill(barred[..., None], float("-inf")).view(choice.shape)

    def __str__(self) -> str:
        parts = [self.scoring]
        parts += ["renormalised"] if self.renormalize else []
        parts += [f"{self.groups_used} of {self.groups} groups"] if self.groups > 1 else []
        parts += [f"times {self.scale:g}"] if self.scale != 1.0 else []
        parts += ["with correction"] if self.correction else []
        return " ".join(parts)


@dataclass(frozen=True)
class MoESpec:
    """Router, routed experts and a shared expert as one layer: [..., hidden] -> [..., hidden].

    Attributes:
        experts: the routed ones.
        router: how tokens find them.
        shared: child of the site that every token goes through, and whose output is added; "" for none.
        shared_gate: child of the site, of one output, whose sigmoid multiplies that of `shared`; "" for none.
        shared_out: the linear that ends `shared`, relative to the site; "" where no one linear does.
    """

    experts: ExpertsSpec
    router: RouterSpec
    shared: str = ""
    shared_gate: str = ""
    shared_out: str = ""

    def __str__(self) -> str:
        beside = f", beside {self.shared}" if self.shared else ""
        beside += f" gated by {self.shared_gate}" if self.shared_gate else ""
        return f"{self.experts}, chosen by {self.router}{beside}"
