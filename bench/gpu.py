"""Speed on a GPU: tfbackend, vLLM's own Transformers backend and its hand-written models, on dummy weights.

    python -m bench.gpu MODELS_DIR RESULTS.jsonl [--runs llama-3.1-8b:eager llama-3.1-8b:compiled ...] [--limit SECONDS]

    python -m bench.gpu MODELS_DIR RESULTS.jsonl --side-by-side llama-3.1-8b:eager

MODELS_DIR holds folders with a config.json of real sizes. Each engine runs in a process of its own, contestants next to
each other in time; what a run gave is appended to RESULTS.jsonl at once, so that a run cut short leaves what it had.
Side by side, three engines live on the GPU at once and take turns: for speeds that hang on the CPU of a machine that
others use, as eager decoding does.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.cpu import launch
from bench.process import CONTESTANTS, ROOT

DECODE, PREFILL = 128, 4096
COMPILED = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]}


def engine(settings: dict[str, Any]) -> dict[str, Any]:
    """Start one engine and measure it: tokens per second, and the kernels of a decode step at batch 1."""
    begun = time.perf_counter()
    from vllm import LLM

    imported = time.perf_counter()
    llm = LLM(**settings)
    ready = time.perf_counter()
    result = {"import_s": imported - begun, "start_s": ready - imported}
    result |= {"b1": _decode(llm, 1), "b64": _decode(llm, 64), "prefill": _prefill(llm)}
    return result | _kernels(llm)


def _generate(llm: Any, batch: int, prompt: int, tokens: int, salt: int) -> float:
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": [(7 * i + j + salt) % 30000 + 5 for j in range(prompt)]} for i in range(batch)]
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False)
    begun = time.perf_counter()
    llm.generate(prompts, sampling, use_tqdm=False)
    return time.perf_counter() - begun


def _decode(llm: Any, batch: int) -> float:
    _generate(llm, batch, 16, 16, 0)
    return max(batch * DECODE / _generate(llm, batch, 16, DECODE, salt) for salt in (1, 2))


def _prefill(llm: Any) -> float:
    _generate(llm, 8, PREFILL, 1, 3)
    return max(8 * PREFILL / _generate(llm, 8, PREFILL, 1, salt) for salt in (4, 5))


def _kernels(llm: Any, steps: int = 16) -> dict[str, Any]:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as short:
        _generate(llm, 1, 16, 4, 6)
    with profile(activities=[ProfilerActivity.CUDA]) as long:
        _generate(llm, 1, 16, 4 + steps, 7)
    before, after = (_device_events(profiler) for profiler in (short, long))
    by_name = {
        name: [(count - before[name][0]) / steps, (busy - before[name][1]) / steps]
        for name, (count, busy) in after.items()
    }
    by_name = {name: found for name, found in by_name.items() if found[0] > 0.5}
    totals = {"kernels": sum(n for n, _ in by_name.values()), "busy_us": sum(us for _, us in by_name.values())}
    return totals | {"by_name": by_name}


def _device_events(profiler: Any) -> defaultdict[str, tuple[int, float]]:
    """Kernel -> (how often it ran, microseconds in all)."""
    found: defaultdict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for event in profiler.events():
        if "CUDA" in str(event.device_type) and not event.name.startswith("Mem"):
            count, busy = found[event.name]
            found[event.name] = count + 1, busy + event.device_time
    return found


def run(model: Path, mode: str, name: str, log: Path, limit: float) -> dict[str, Any]:
    """One engine in a subprocess; its result, or how it ended."""
    extra, env = CONTESTANTS[name]
    settings = {
        "model": str(model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": 8192,
        "max_num_seqs": 64,
        "enforce_eager": mode == "eager",
        "enable_prefix_caching": False,
        "gpu_memory_utilization": 0.8,
        "disable_log_stats": True,
        **extra,
    }
    if mode == "compiled":
        settings["compilation_config"] = COMPILED
    command = [sys.executable, "-m", "bench.gpu", "--engine", json.dumps(settings)]
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} | env
    with log.open("w") as file:
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=file, timeout=limit, text=True
            )
        except subprocess.TimeoutExpired:
            return {"error": f"no result within {limit:.0f} s"}
    with log.open("a") as file:
        file.write(done.stdout)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"import_s"')]
    return json.loads(lines[-1]) if lines else {"error": "\n".join(log.read_text().splitlines()[-8:])}


def side_by_side(item: str, contestants: list[str], models: Path, results: Path) -> None:
    """Decode at batch 1 and 64 in turns, all engines at once."""
    model, mode = item.rsplit(":", 1)
    settings = {
        "model": str(models / model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": 2048,
        "max_num_seqs": 64,
        "enforce_eager": mode == "eager",
        "gpu_memory_utilization": round(0.94 / len(contestants), 2),
    }
    if mode == "compiled":
        settings["compilation_config"] = COMPILED
    for contestant in launch(contestants, settings, 8, ((1, DECODE), (64, DECODE))):
        speeds = {f"b{batch}": statistics.median(found) for batch, found in contestant.speeds.items()}
        result = {"model": model, "mode": f"{mode}, in turns", "contestant": contestant.name, **speeds}
        with results.open("a") as file:
            file.write(json.dumps(result | {"all": contestant.speeds}) + "\n")
        print(json.dumps(result), flush=True)


def table(results: list[dict[str, Any]]) -> Table:
    """All results so far, one row an engine."""
    columns = ("b1", "b64", "prefill", "kernels", "busy_us", "import_s", "start_s")
    out = Table("model", "mode", "contestant", *columns)
    for r in results:
        values = [f"{r[c]:,.1f}" if c in r else "" for c in columns]
        out.add_row(r["model"], r["mode"], r["contestant"], *(values if "error" not in r else [r["error"][-60:]]))
    return out


def main() -> int:
    """Run what was asked for until the time is up, and print the table."""
    if sys.argv[1:2] == ["--engine"]:
        print(json.dumps(engine(json.loads(sys.argv[2]))), flush=True)
        return 0
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--runs", nargs="+", default=["llama-3.1-8b:eager", "llama-3.1-8b:compiled"])
    parser.add_argument("--limit", type=float, default=540)
    parser.add_argument("--each", type=float, default=200, help="seconds that one engine may take")
    parser.add_argument("--contestants", nargs="+", default=list(CONTESTANTS), choices=list(CONTESTANTS))
    parser.add_argument("--side-by-side", nargs="+", default=[])
    options = parser.parse_args()
    for item in options.side_by_side:
        side_by_side(item, options.contestants, options.models, options.results)
    if options.side_by_side:
        return 0
    deadline, results = time.monotonic() + options.limit, []
    for item in options.runs:
        model, mode = item.rsplit(":", 1)
        for name in options.contestants:
            left = deadline - time.monotonic()
            if left < 30:
                break
            log = options.results.with_name(f"{model}-{mode}-{name}.log")
            result = {"model": model, "mode": mode, "contestant": name}
            result |= run(options.models / model, mode, name, log, min(left, options.each))
            results.append(result)
            with options.results.open("a") as file:
                file.write(json.dumps(result) + "\n")
            print(json.dumps({key: value for key, value in result.items() if key != "by_name"}), flush=True)
    Console(width=150).print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
