"""A verification as JSON; docs/verify.md has the schema. Fields are added, never renamed, while SCHEMA stays."""

from __future__ import annotations

import math
from typing import Any

from tfbackend import __version__
from tfbackend.verification.judge import LOGPROB, MARGIN
from tfbackend.verification.ladder import CONFIG, TINY, Report
from tfbackend.verification.rungs import STATUS, UNKNOWN, Result, overall
from tfbackend.verification.vectors import APART, COSINE

SCHEMA = 1
BOUNDS = {"margin": MARGIN, "logprob": LOGPROB, "apart": APART, "cosine": COSINE}


def document(report: Report) -> dict[str, Any]:
    """Everything that was found."""
    verdict = overall(report.results)
    return {
        "schema": SCHEMA,
        "tfbackend": __version__,
        "model": report.request.model,
        "architecture": report.architecture or None,
        "weights": report.weights,
        "level": report.request.level,
        "verdict": verdict,
        "status": STATUS[verdict],
        "error": None,
        "seconds": round(report.seconds, 3),
        "bounds": BOUNDS,
        "rungs": [_rung(result) for result in report.results],
    }


def failure(model: str, level: str, error: str) -> dict[str, Any]:
    """A verification that could not begin."""
    return {
        "schema": SCHEMA,
        "tfbackend": __version__,
        "model": model,
        "architecture": None,
        "weights": None,
        "level": level,
        "verdict": UNKNOWN,
        "status": STATUS[UNKNOWN],
        "error": error,
        "seconds": 0.0,
        "bounds": BOUNDS,
        "rungs": [],
    }


def _rung(result: Result) -> dict[str, Any]:
    rung, finding = result.rung, result.finding
    finite = finding.value is not None and math.isfinite(finding.value)
    return {
        "name": rung.name,
        "title": rung.title,
        "level": rung.level,
        "of": result.of,
        "verdict": finding.verdict,
        "figure": finding.figure,
        "value": finding.value if finite else None,
        "unit": finding.unit or None,
        "detail": finding.detail,
        "needs": finding.needs,
        "failure_means": rung.means,
        "seconds": round(result.seconds, 3),
    }


def remark(result: Result) -> str:
    """What the result is of, where that is not the checkpoint as it is."""
    return {CONFIG: "config, full size", TINY: TINY}.get(result.of, "")
