"""Mixers with state for which the engine has layers of its own; see layerspecs and statespec."""

from __future__ import annotations

from tfbackend.deltaspec import DeltaSpec
from tfbackend.shortconvspec import ShortConvSpec
from tfbackend.ssdspec import SSDSpec
from tfbackend.statespec import StateSpec

NativeSpec = SSDSpec | ShortConvSpec | DeltaSpec
NATIVE_SPECS = (SSDSpec, ShortConvSpec, DeltaSpec)
StatefulSpec = StateSpec | NativeSpec


def state_bytes(spec: StatefulSpec, tp_size: int, itemsize: int) -> int:
    """Bytes of a request's state on a rank. A mixer that runs as Transformers wrote it has all of its state on each."""
    return spec.nbytes if isinstance(spec, StateSpec) else spec.rank_bytes(tp_size, itemsize)
