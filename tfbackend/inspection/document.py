"""The inspection as plain values for `--json`.

docs/inspect.md describes every key. Within one schema number keys are added and never change or go.
"""

from __future__ import annotations

import math
from typing import Any

import transformers

from tfbackend import __version__
from tfbackend.inspection.accounts import Accounts
from tfbackend.inspection.examine import Inspection
from tfbackend.inspection.memory import ALLOWANCE, BATCHED_TOKENS, BLOCK, IN_FLIGHT_STEPS, StageMemory
from tfbackend.inspection.pooling import Pooling
from tfbackend.inspection.tree import Site
from tfbackend.inspection.verdict import NOT_SERVED, WORDS, Finding
from tfbackend.meta import EMBED

SCHEMA = "tfbackend.inspect/1"


def document(found: Inspection) -> dict[str, Any]:
    """Everything, as values that json can write."""
    serving, served = found.serving, found.served
    return {
        "schema": SCHEMA,
        "versions": {"tfbackend": __version__, "transformers": transformers.__version__},
        "model": found.request.model,
        "status": found.status,
        "verdict": WORDS[found.status],
        "error": None,
        "problems": [_finding(f) for f in found.problems],
        "losses": [_finding(f) for f in found.losses],
        "serving": {
            "tp": serving.tp_size, "pp": serving.pp_size, "ep": serving.ep,
            "dtype": str(serving.dtype).removeprefix("torch."), "quantization": serving.quantization,
            "max_model_len": serving.max_model_len,
        },
        "served": {
            "architecture": found.architecture, "class": served.name, "ours": served.ours, "mro": list(served.mro),
            "can": list(served.can), "cannot": list(served.cannot),
        },
        "modules": site_document(found.tree),
        "forwards": [{"class": d.cls, "place": d.place, "sites": list(d.sites), "diff": d.text} for d in found.diffs],
        "parameters": [_parameter(p) for p in found.parameters],
        "collectives": [{"kind": c.kind, "after": c.after, "layer": c.layer} for c in found.collectives],
        "tp_that_divide": list(found.good_ranks),
        "memory": _memory(found),
        "weights": _weights(found),
        "pooling": _pooling(found.pooling),
    }  # fmt: skip


def _pooling(pooling: Pooling | None) -> dict[str, Any] | None:
    if pooling is None:
        return None
    modules = [{"path": path, "what": what} for path, what in pooling.modules]
    return {
        "task": pooling.task, "of": pooling.which, "labels": pooling.labels, "modules": modules,
        "alone": list(pooling.alone), "normalised": pooling.normalised if pooling.task == EMBED else None,
    }  # fmt: skip


def failure(model: str, error: str) -> dict[str, Any]:
    """The document of a model that could not be looked at: no key but these."""
    return {"schema": SCHEMA, "model": model, "status": NOT_SERVED, "verdict": WORDS[NOT_SERVED], "error": error}


def _finding(finding: Finding) -> dict[str, Any]:
    return {"what": finding.what, "where": list(finding.where), "remedy": finding.remedy, "place": finding.place}


def site_document(site: Site) -> dict[str, Any]:
    """One site with all below it."""
    return {
        "name": site.name,
        "path": site.path,
        "class": site.cls,
        "count": site.count,
        "state": site.state,
        "becomes": list(site.becomes),
        "proof": site.proof or None,
        "misses": [{"fuser": fuser, "reason": reason, "place": place} for fuser, reason, place in site.misses],
        "place": site.place,
        "parameters": [{"name": n, "shape": list(s), "rank_shape": list(r)} for n, s, r in site.parameters],
        "children": [site_document(child) for child in site.children],
    }


def _parameter(p: Any) -> dict[str, Any]:
    return {
        "name": p.name, "shape": list(p.shape), "rank_shape": list(p.rank_shape),
        "dtype": str(p.dtype).removeprefix("torch."), "how": p.how, "dim": p.dim, "replicas": p.replicas,
        "layer": p.layer, "rank_bytes": p.rank_bytes, "problem": p.problem, "tied_to": p.tied_to or None,
    }  # fmt: skip


def _memory(found: Inspection) -> dict[str, Any]:
    memory, fit = found.memory, found.memory.fit
    return {
        "weights_bytes": memory.weights,
        "estimated": memory.estimated,
        "kv_bytes_per_token": memory.kv_bytes_per_token,
        "state_bytes_per_request": memory.state_bytes_per_request,
        "stages": [_stage(stage) for stage in memory.stages],
        "assumed": {"block_tokens": BLOCK, "batched_tokens": BATCHED_TOKENS, "steps_in_flight": IN_FLIGHT_STEPS,
                    "allowance_bytes": ALLOWANCE},
        "fit": None if fit is None else {
            "gpu_bytes": fit.gpu, "utilisation": fit.utilisation, "available_bytes": fit.available,
            "longest": fit.longest, "limit": fit.limit,
            "requests": round(fit.requests, 2) if math.isfinite(fit.requests) else None,
        },
    }  # fmt: skip


def _stage(stage: StageMemory) -> dict[str, Any]:
    return {
        "layers": [stage.layers.start, stage.layers.stop],
        "weights_bytes": stage.weights,
        "kv_block_bytes": stage.cache.block_bytes,
        "kv_groups": [
            {"layers": g.layers, "window": g.window, "tables": g.tables, "block_tokens": g.block}
            for g in stage.cache.groups
        ],
    }


def _weights(found: Inspection) -> dict[str, Any] | None:
    headers = found.headers
    if headers is None:
        return None
    return {"files": list(headers.files), "bytes": headers.nbytes, "note": headers.note} | _ledger(found.accounts)


def _ledger(accounts: Accounts | None) -> dict[str, Any]:
    if accounts is None:
        return {"complete": None, "counts": {}, "rules": {}, "tensors": [], "unfilled": []}
    return {
        "complete": accounts.complete,
        "counts": dict(accounts.counts),
        "rules": dict(accounts.rules),
        "tensors": [
            {"name": e.tensor.name, "shape": None if e.tensor.shape is None else list(e.tensor.shape),
             "dtype": e.tensor.dtype, "file": e.tensor.file, "outcome": e.outcome, "place": e.place, "note": e.note}
            for e in accounts.entries
        ],
        "unfilled": [{"place": gap.place, "wanted": gap.wanted} for gap in accounts.gaps],
    }  # fmt: skip
