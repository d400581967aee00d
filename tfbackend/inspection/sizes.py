"""Sizes and ranges as people write them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from tfbackend.errors import ConfigError

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def parse_bytes(text: str) -> int:
    """ "141GB" -> 141 * 10**9, "80GiB" -> 80 * 2**30; a bare number is bytes.

    Raises:
        ConfigError: the text is not a positive number with such a unit.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", text.upper())
    if found is None or found.group(2) not in _UNITS or float(found.group(1)) <= 0:
        raise ConfigError("This is not an amount of memory.", found=text, needed="a number and a unit: 141GB, 80GiB")
    return int(float(found.group(1)) * _UNITS[found.group(2)])


def bytes_text(count: float) -> str:
    """Bytes in decimal units, as GPUs are sold: 269,060,552 -> "269.1 MB"."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count:,.0f} B"


def count_text(count: int) -> str:
    """A number of parameters: 8,030,261,248 -> "8.03 billion"."""
    for word, size in (("billion", 10**9), ("million", 10**6)):
        if count >= size:
            return f"{count / size:,.4g} {word}" if count < 1000 * size else f"{count / size:,.0f} {word}"
    return f"{count:,}"


def ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> "0-2,5"; a long list with an even step says so: "0,2..40"."""
    found = sorted(numbers)
    steps = {b - a for a, b in itertools.pairwise(found)}
    if len(found) > 3 and len(steps) == 1 and steps != {1}:
        return f"{found[0]},{found[1]}..{found[-1]}"
    runs: list[list[int]] = []
    for n in found:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def shape_text(shape: Sequence[int]) -> str:
    """(576, 1536) -> "576 x 1536", () -> "scalar"."""
    return " x ".join(map(str, shape)) or "scalar"
