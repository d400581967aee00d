"""Language models that rank: the logits of a few tokens, of which a config says that they are labels.

    {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["no", "yes"],
     "method": "from_2_way_softmax"}

The checkpoint is that of the language model. The classifier's one linear gets rows of its head: those of the tokens,
or, for a softmax over two of them, that of the second less that of the first, whose sigmoid the softmax is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tfbackend.classifier import ClassifierPlan
from tfbackend.errors import ConfigError, UnsupportedModelError
from tfbackend.graph.observe import observe
from tfbackend.head import plan_head
from tfbackend.meta import MetaModel
from tfbackend.weights import build_weight_map
from tfbackend.weights.mapping import HEAD
from tfbackend.weights.outcomes import Placement

TWO_WAY, PLAIN = "from_2_way_softmax", "no_post_processing"


@dataclass(frozen=True)
class Reranker:
    """What a config says of the tokens that are labels.

    Attributes:
        tokens: their texts.
        two_way: whether the one label is the second of two.
    """

    tokens: tuple[str, ...]
    two_way: bool

    @property
    def labels(self) -> int:
        """How many logits there are."""
        return 1 if self.two_way else len(self.tokens)

    def rows(self, head: torch.Tensor, ids: Sequence[int]) -> torch.Tensor:
        """Rows [vocabulary, hidden] of a head -> [labels, hidden] in float32."""
        picked = head[list(ids)].float()
        return picked[1:] - picked[:1] if self.two_way else picked

    def convert(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        ids: Sequence[int],
        is_head: Callable[[str], bool],
        target: str,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of a language model, and those rows of its head as the tensor `target`.

        Raises:
            UnsupportedModelError: the head is quantized.
        """
        for name, tensor in weights:
            if is_head(name):
                if not tensor.is_floating_point():
                    raise UnsupportedModelError(
                        "The head of a quantized language model has no rows to make a classifier of.", where=name
                    )
                yield target, self.rows(tensor, ids)
            yield name, tensor


def reranker_of(config: Any) -> Reranker | None:
    """What the config says; None where it says nothing.

    Raises:
        ConfigError: it says something that is not known.
    """
    text = config.get_text_config()
    tokens, method = (
        getattr(config, name, None) or getattr(text, name, None) for name in ("classifier_from_token", "method")
    )
    if tokens is None:
        return None
    if method is None and getattr(config, "is_original_qwen3_reranker", False):
        method = TWO_WAY
    if not tokens or method not in (TWO_WAY, PLAIN) or (method == TWO_WAY and len(tokens) != 2):
        raise ConfigError(
            "The labels of a language model that ranks cannot be told from its tokens.",
            where="config.json: classifier_from_token, method",
            found=f"{tokens!r}, {method!r}",
            needed=f"tokens, and the method {PLAIN}, or two tokens and {TWO_WAY}",
        )
    return Reranker(tuple(tokens), method == TWO_WAY)


def settle_labels(config: Any) -> None:
    """Let the config have as many labels as it names tokens for."""
    if (found := reranker_of(config)) is not None:
        for each in {id(c): c for c in (config, config.get_text_config())}.values():
            each.num_labels = found.labels


def classifier_weight(model: nn.Module, plan: ClassifierPlan) -> str:
    """Name of the weight of the one linear that a classifier is.

    Raises:
        UnsupportedModelError: it is more than that.
    """
    parts = {path: model.get_submodule(path) for path in plan.modules}
    linears = [path for path, part in parts.items() if isinstance(part, nn.Linear) and part.bias is None]
    others = [path for path, part in parts.items() if path not in linears and not isinstance(part, nn.Dropout)]
    if len(linears) != 1 or others:
        raise UnsupportedModelError(
            "The head of a language model cannot be made this classifier.",
            where=type(model).__name__,
            found=f"{', '.join(plan.modules) or 'nothing'} between hidden states and logits",
            needed="one linear without a bias",
        )
    return f"{linears[0]}.weight"


def head_finder(causal: MetaModel, plan: Any) -> Callable[[str], bool]:
    """Tells whether a tensor of the checkpoint is the head of the language model, or the table that the head shares.

    Args:
        causal: the language model of the checkpoint.
        plan: a plan of it that rewrites nothing.

    Raises:
        UnsupportedModelError: its logits are more than a product with the head.
    """
    head = plan_head(causal, observe(causal.base))
    if str(head) != "plain":
        raise UnsupportedModelError(
            "The logits of a language model are more than a product with its head, so no classifier can be made of it.",
            where=type(causal.model).__name__,
            found=str(head),
        )
    weight_map = build_weight_map(causal.model, plan)
    tied = f"{causal.embedding_path}.weight" if causal.tied else ""

    def is_head(name: str) -> bool:
        outcome = weight_map.resolve(name)
        if not isinstance(outcome, Placement):
            return False
        return outcome.canonical == tied if tied else outcome.target == f"{HEAD}.weight"

    return is_head
