"""What an engine that gave no answer has to say for itself."""

from __future__ import annotations

from tfbackend.verification.processes import Outcome

LOADED = "tfbackend verify: the engine is up"
"""An engine prints this once it has loaded, so that a later death can be told from one before."""
_LONGEST = 600


def loaded_before(outcome: Outcome) -> bool:
    """Whether the engine came up before it failed."""
    return LOADED in outcome.log


def died(outcome: Outcome) -> str:
    """Its error, and the last line of its log where that says more."""
    lines = [line.strip() for line in outcome.log.splitlines() if line.strip() and LOADED not in line]
    last = lines[-1] if lines else ""
    text = " ".join(outcome.error.split())
    if last and last[:80] not in text:
        text += f" (last line of its log: {last})"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
