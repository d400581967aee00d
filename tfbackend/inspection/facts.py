"""The figures of an inspection as sentences, for the terminal and the page alike."""

from __future__ import annotations

from collections import Counter

from tfbackend.inspection.examine import Inspection
from tfbackend.inspection.memory import ALLOWANCE, BATCHED_TOKENS, IN_FLIGHT_STEPS, Cache
from tfbackend.inspection.sizes import bytes_text, count_text, ranges


def title_line(found: Inspection) -> str:
    """What would be served, as what, on what."""
    total = sum(p.count for p in found.parameters)
    serving = found.serving
    split = f"{serving.tp_size} rank{'s' * (serving.tp_size > 1)}"
    split += f" x {serving.pp_size} stages" if serving.pp_size > 1 else ""
    quantized = f", {serving.quantization}" if serving.quantization else ""
    return (
        f"{found.architecture} as {found.served.name}: {count_text(total)} parameters, "
        f"{str(serving.dtype).removeprefix('torch.')}{quantized}, {split}"
    )


def class_lines(found: Inspection) -> list[str]:
    """The serving class, its MRO and its capabilities."""
    served = found.served
    if not served.ours:
        return [f"{served.name}, which tfbackend does not have yet"]
    can = [f"can: {', '.join(served.can)}"] if served.can else []
    cannot = [f"cannot: {', '.join(served.cannot)}"] if served.cannot else []
    return [f"{served.name}: {' > '.join(served.mro[1:])}", *can, *cannot]


def pooling_facts(found: Inspection) -> list[tuple[str, list[str]]]:
    """What a model that pools gives, under its title; nothing for one that generates."""
    return [("Pooling", found.pooling.lines())] if found.pooling is not None else []


def _a_layer(found: Inspection, kind: str) -> str:
    """How often each layer exchanges in this way; "" for never."""
    per_layer = Counter(c.layer for c in found.collectives if c.layer is not None and c.kind == kind)
    return " or ".join(map(str, sorted(set(per_layer.values()))))


def layout_lines(found: Inspection) -> list[str]:
    """How often ranks exchange, and how KV heads are kept."""
    lines = []
    if found.serving.tp_size > 1:
        reduced, gathered = (_a_layer(found, kind) for kind in ("all-reduce", "all-gather"))
        each = f"{reduced or 'no'} all-reduces" + (f" and {gathered} all-gathers" if gathered else "")
        lines.append(f"{each} a layer, one after the embedding, one gather of the logits")
        copies = max((p.replicas for p in found.parameters), default=1)
        lines += [f"each KV head is kept on {copies} ranks"] if copies > 1 else []
    good = [n for n in found.good_ranks if n > 1]
    lines.append(f"tp {', '.join(map(str, good))} would divide everything" if good else "nothing divides over 2 ranks")
    return lines


def memory_lines(found: Inspection) -> list[str]:
    """Weights, cache and the longest context."""
    memory = found.memory
    a_rank = "on each rank" if found.serving.tp_size * found.serving.pp_size > 1 else ""
    stages = f", the fullest of {len(memory.stages)} stages" if len(memory.stages) > 1 else ""
    guess = " (estimated from the bits of quantized linears)" if memory.estimated else ""
    lines = [" ".join(f"{bytes_text(memory.weights)} of weights {a_rank}".split()) + stages + guess]
    cache = max((stage.cache for stage in memory.stages), key=lambda c: c.request_bytes(1 << 16))
    state = memory.state_bytes_per_request
    lines += cache_lines(cache, found.serving.max_model_len) if cache.groups or not state else []
    lines += [f"{state:,} B of state a request, however long it is"] if state else []
    if found.plan.max_context is not None:
        lines.append(f"contexts of up to {found.plan.max_context:,} tokens: of longer ones a layer leaves out some")
    if memory.fit is not None and (cache.groups or state):
        fit = memory.fit
        room = f"{bytes_text(fit.gpu)} x {fit.utilisation:g} - weights - {bytes_text(ALLOWANCE)} for activations"
        if fit.longest == 0:
            return [*lines, f"no request fits: {room} leaves {bytes_text(max(fit.available, 0))}"]
        whose = "as much as is allowed" if fit.longest == fit.limit else f"of {fit.limit:,}"
        lines.append(f"{fit.longest:,} tokens of context fit ({whose}), {fit.requests:,.1f} such requests at once")
        lines.append(f"  {room} = {bytes_text(fit.available)} for the cache")
    return lines


def cache_lines(cache: Cache, limit: int) -> list[str]:
    """Bytes a token, and how windows are counted for requests of up to `limit` tokens."""
    if not cache.groups:
        return ["KV cache not known: no attention layer could be planned"]
    whole = [g for g in cache.groups if g.window is None]
    windowed = [g for g in cache.groups if g.window is not None]
    lines = []
    if whole:
        layers = sum(g.layers for g in whole)
        lines.append(f"{cache.bytes_per_token:,} B of KV cache a token, in {layers} layers that see all of it")
    for group in windowed:
        held = group.blocks(limit) * cache.block_bytes
        lines.append(f"at most {bytes_text(held)} a request in {group.layers} layers of window {group.window:,}")
    if windowed:
        lines.append(f"  vLLM's count: window - 1 + {IN_FLIGHT_STEPS} x {BATCHED_TOKENS:,} tokens in flight, in blocks")
    return lines


def accounts_lines(found: Inspection) -> list[str]:
    """The ledger in a few sentences."""
    headers, accounts = found.headers, found.accounts
    if headers is None:
        return ["not at hand, only the config: nothing is said of the checkpoint"]
    lines = [headers.note] if headers.note else []
    if accounts is None:
        return lines or ["no header could be read"]
    counts, size = accounts.counts, f", {bytes_text(headers.nbytes)}" if headers.nbytes else ""
    files = f"{len(headers.files)} file{'s' * (len(headers.files) != 1)}"
    lines.append(
        f"{len(accounts.entries):,} tensors in {files}{size}: {counts['placed']:,} placed, "
        f"{counts['dropped']:,} dropped by rule"
    )
    for rule in accounts.rules:
        names = [entry.tensor.name for entry in accounts.entries if entry.note == rule]
        lines.append(f"  {rule}: {', '.join(names[:2])}" + (f" and {len(names) - 2} more" if len(names) > 2 else ""))
    bad = [f"{counts[k]:,} {k}" for k in ("unexpected", "misfit", "duplicate") if counts[k]]
    bad += [f"{len(accounts.gaps):,} parameters or shards unfilled"] if accounts.gaps else []
    lines.append("; ".join(bad) if bad else "every parameter and every shard would be filled, once")
    return lines


def stage_lines(found: Inspection) -> list[str]:
    """One line for each pipeline stage, where there are several."""
    if len(found.memory.stages) < 2:
        return []
    return [
        f"stage {index}: layers {ranges(list(stage.layers))}, {bytes_text(stage.weights)} of weights"
        for index, stage in enumerate(found.memory.stages)
    ]
