"""Values that no config of a model can have, found before they turn into an error deep inside a layer.

Works on plain values, so that a config.json can be held against it before anything makes a config of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from tfbackend.errors import ConfigError

SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
)
_MAY_BE_INFINITE = ("time_step_limit", "time_step_max", "attention_bias_cap")


def check_numbers(config: Mapping[str, Any]) -> None:
    """Raises ConfigError: a number, however deep, is NaN or infinite."""
    for name, value in _numbers(config):
        if not math.isfinite(value) and name.rsplit(".", 1)[-1] not in _MAY_BE_INFINITE:
            raise ConfigError(
                "A value of the config is not a number.",
                where=f"config.json: {name}",
                found=str(value),
                needed="a finite number",
                remedy="Download config.json again, or mend the value",
            )


def check_sizes(sizes: Mapping[str, Any]) -> None:
    """Raises ConfigError: one of `SIZES` is zero or negative, or query heads do not divide into KV heads."""
    for name in SIZES:
        size = sizes.get(name)
        if isinstance(size, int) and size <= 0:
            raise ConfigError(
                "A size of the config is not positive.",
                where=f"config.json: {name}",
                found=str(size),
                needed="1 or more",
                remedy="Mend the value in config.json",
            )
    heads, kv_heads = sizes.get("num_attention_heads"), sizes.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(kv_heads, int) and heads % kv_heads:
        raise ConfigError(
            "Query heads do not divide into KV heads.",
            where="config.json: num_attention_heads",
            found=f"{heads} query heads, {kv_heads} KV heads",
            needed="a multiple",
            remedy="Mend the values in config.json",
        )


def place_of(value: Any, config: Mapping[str, Any]) -> str:
    """The dotted name of the first text field that is `value`, or ""."""
    for name, item in config.items():
        if item == value and isinstance(item, str):
            return str(name)
        if isinstance(item, Mapping) and (inside := place_of(value, item)):
            return f"{name}.{inside}"
    return ""


def _numbers(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _numbers(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _numbers(item, name)
    elif isinstance(value, float):
        yield name, value
