"""What this machine has to run engines on."""

from __future__ import annotations

import importlib.util
import os


def devices() -> int:
    """GPUs that can be seen, without making one ready for use."""
    import torch

    return int(torch.cuda.device_count())


def has_vllm() -> bool:
    """Whether vLLM is installed."""
    return importlib.util.find_spec("vllm") is not None


def room_for(ranks: int) -> str:
    """What is missing for so many ranks, "" for nothing: a GPU each, or a core each where there is no GPU."""
    if found := devices():
        return "" if found >= ranks else f"{ranks} GPUs, this machine shows {found}"
    cores = len(os.sched_getaffinity(0))
    return "" if cores >= ranks else f"{ranks} cores, this process may use {cores}"
