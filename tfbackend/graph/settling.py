"""Models that change their own weights in their first forward, as by a factor that keeps float16 from overflowing.

An engine may compile a forward, or capture it, and a change of weights does not belong in what is run again and again.
The method that makes the change is found in the run on meta, to be called once, after the weights are loaded.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from types import FrameType
from typing import NamedTuple

from torch import nn


class Settling(NamedTuple):
    """A method without arguments that changes weights: module path and name, "" for changes made in no such method."""

    path: str
    method: str


def settling(paths: Mapping[int, str]) -> Settling:
    """Which method of a module, called by that module's forward, is changing a weight now.

    Args:
        paths: path of each module of the model by id.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = _owner(frame)
        caller = frame.f_back
        if owner is not None and frame.f_code.co_argcount == 1 and caller is not None and _is_forward(caller, owner):
            return Settling(paths.get(id(owner), ""), frame.f_code.co_name)
        frame = caller
    return Settling("", "")


def _owner(frame: FrameType) -> nn.Module | None:
    first = frame.f_code.co_varnames[:1] if frame.f_code.co_argcount else ()
    owner = next((frame.f_locals.get(name) for name in first), None)
    return owner if isinstance(owner, nn.Module) else None


def _is_forward(frame: FrameType, owner: nn.Module) -> bool:
    return _owner(frame) is owner and frame.f_code is inspect.unwrap(type(owner).forward).__code__
