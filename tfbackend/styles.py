"""How Transformers shares out the linears of a model to tensor-parallel ranks."""

from __future__ import annotations

import re

from torch import nn

from tfbackend.fusers.products import linear_shape
from tfbackend.layerspecs import COLWISE, COLWISE_GATHER, REPLICATED, ROWWISE, ROWWISE_SPLIT
from tfbackend.meta import MetaModel

_STYLES = {
    "colwise": COLWISE,
    "rowwise": ROWWISE,
    "colwise_rep": COLWISE_GATHER,
    "colwise_gather_output": COLWISE_GATHER,
    "rowwise_rep": ROWWISE_SPLIT,
    "rowwise_split_input": ROWWISE_SPLIT,
}
"""Transformers' names of tensor-parallel styles; every other style keeps whole copies on each rank."""


def tensor_parallel_styles(meta: MetaModel) -> dict[str, str]:
    """Style by module path relative to the base model, from the plan that the Transformers class carries."""
    raw = dict(getattr(meta.base, "_tp_plan", None) or {})
    raw |= dict(getattr(meta.base.config, "base_model_tp_plan", None) or {})
    styles: dict[str, str] = {}
    patterns = [(_glob(pattern), _STYLES.get(style, REPLICATED)) for pattern, style in raw.items() if style]
    for path, module in meta.base.named_modules():
        if isinstance(module, nn.Linear) or linear_shape(module) is not None:
            for pattern, style in patterns:
                if pattern.fullmatch(path) or pattern.fullmatch(f"{meta.base_path}.{path}"):
                    styles[path] = style
    return styles


def _glob(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
