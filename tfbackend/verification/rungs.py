"""The rungs of the ladder: what each asks, what its failure would mean, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass

from tfbackend.meta import CLASSIFY, EMBED

PASS, FAIL, UNKNOWN, NOT_RUN = "pass", "fail", "cannot tell", "not run"
QUICK, DEFAULT, FULL = "quick", "default", "full"
LEVELS = (QUICK, DEFAULT, FULL)


@dataclass(frozen=True)
class Rung:
    """One question about a served model.

    Attributes:
        name: short and stable, for programs.
        title: what passes, for people.
        means: what its failure would mean.
        level: the least thorough run that asks it.
        needed: whether nothing further can be asked where this is not passed.
    """

    name: str
    title: str
    means: str
    level: str
    needed: bool = False


@dataclass(frozen=True)
class Finding:
    """The answer to one rung.

    Attributes:
        verdict: PASS, FAIL, UNKNOWN or NOT_RUN.
        figure: what the verdict rests on, in a few words.
        value: the figure as a number, None where it is none.
        unit: of the value.
        detail: what went wrong and where, "" for nothing.
        needs: what it would take to run, where it was not.
    """

    verdict: str
    figure: str = ""
    value: float | None = None
    unit: str = ""
    detail: str = ""
    needs: str = ""


@dataclass(frozen=True)
class Result:
    """A rung, what was found, on what weights ("checkpoint", "config", "tiny random checkpoint"), in how many
    seconds."""

    rung: Rung
    finding: Finding
    of: str
    seconds: float = 0.0


RUNGS: tuple[Rung, ...] = (
    Rung(
        "meta", "builds on meta", "Transformers cannot make this model from its config, so nothing can serve it.",
        QUICK, needed=True,
    ),
    Rung(
        "proofs", "every rewrite proven",
        "The model is refused by name, or a fused path is used that was never compared with the original.",
        QUICK, needed=True,
    ),
    Rung(
        "ledger", "ledger complete",
        "A tensor has no place, or a parameter no tensor: the model would be refused, or served half empty.",
        QUICK, needed=True,
    ),
    Rung(
        "loads", "loads and starts", "The engine does not come up on this checkpoint, or another backend serves it.",
        QUICK, needed=True,
    ),
    Rung(
        "finite", "one forward finite", "Some module overflows or reads memory that nobody wrote.", QUICK,
    ),
    Rung(
        "greedy", "greedy tokens equal Transformers'", "The served model says other things than the model does.", QUICK,
    ),
    Rung(
        "topk", "top log-probabilities equal Transformers'",
        "A scale, a cap or a bias is off: greedy tokens may hide it, sampling does not.", QUICK,
    ),
    Rung(
        "batch", "alone = in a batch of 30", "Requests see each other: a state, a mask or a cache slot is shared.",
        DEFAULT,
    ),
    Rung(
        "chunked", "chunked = unchunked prefill",
        "Long prompts are read wrongly: positions, windows or state are lost between chunks.", DEFAULT,
    ),
    Rung(
        "prefix", "cold = warm prefix cache", "A prompt is answered differently once its beginning is cached.", DEFAULT,
    ),
    Rung(
        "compiled", "eager = compiled", "torch.compile changes what the model computes.", FULL,
    ),
    Rung(
        "tp2", "two tensor-parallel ranks = one", "A rank holds the wrong shard, or a sum over the ranks is missing.",
        FULL,
    ),
    Rung(
        "pp2", "two pipeline stages = one", "Something that a stage needs stays behind on another.", FULL,
    ),
)  # fmt: skip


POOLING: dict[str, Rung] = {
    EMBED: Rung(
        "cosine", "vectors equal Transformers'",
        "The served model gives other vectors than the model does: what is near in one is not in the other.", QUICK,
    ),
    CLASSIFY: Rung(
        "logits", "logits equal Transformers'",
        "The served model judges otherwise than the model does: a part of its head, or the token that it reads.", QUICK,
    ),
}  # fmt: skip
"""What a model that pools is asked in place of tokens, by its task."""
_OF_TEXTS = ("greedy", "topk", "chunked", "prefix", "pp2")
"""Rungs that only a model that generates has: one that pools is given whole prompts, in one call."""


def rungs_of(task: str) -> tuple[Rung, ...]:
    """The ladder of a model that is served for `task`, one of meta.TASKS."""
    if task not in POOLING:
        return RUNGS
    rungs = [rung for rung in RUNGS if rung.name not in _OF_TEXTS]
    rungs.insert(1 + next(i for i, rung in enumerate(rungs) if rung.name == "finite"), POOLING[task])
    return tuple(rungs)


def asked(rung: Rung, level: str) -> bool:
    """Whether a run of this level asks the rung."""
    return LEVELS.index(rung.level) <= LEVELS.index(level)


def overall(results: tuple[Result, ...]) -> str:
    """PASS, FAIL or UNKNOWN for all of it: a quick rung that was not run leaves it open, a further one does not."""
    verdicts = [result.finding.verdict for result in results]
    if FAIL in verdicts:
        return FAIL
    open_ = any(r.finding.verdict == NOT_RUN and r.rung.level == QUICK for r in results)
    return UNKNOWN if UNKNOWN in verdicts or open_ or not results else PASS


STATUS = {PASS: 0, FAIL: 1, UNKNOWN: 2}
"""Exit statuses."""
