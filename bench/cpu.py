"""Tokens per second on the CPU: tfbackend, vLLM's own Transformers backend and its hand-written Llama, alternating.

    python -m bench.cpu [--model DIR] [--rounds N] [--modes eager compiled] [--contestants tfbackend in-tree native]

Timings on a shared machine drift, so the contestants take turns within one run and what counts is the ratio of medians.
Of several equal engines the one that was started first is some 8% slower than those after it for as long as it lives,
so they are started anew as often as there are contestants, each once in each place. The exit status is 1 where a ratio
is below 0.97.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.process import CONTESTANTS, ROOT, EngineProcess

MODEL = ROOT / ".cache" / "smollm2-135m-instruct"
LEAST = 0.97


class Contestant(EngineProcess):
    """An engine process and the tokens per second of its rounds, by batch size."""

    def __init__(self, name: str, settings: dict[str, Any], log: Path) -> None:
        extra, env = CONTESTANTS[name]
        settings = {"dtype": "bfloat16", "enable_prefix_caching": False, "disable_log_stats": True, **settings, **extra}
        super().__init__(name, ["bench.contestant", json.dumps(settings)], env, log)
        self.speeds = dict[int, list[float]]()

    def turn(self, number: int, batch: int, tokens: int) -> None:
        """One timed generation, noted unless it is the first, which warms up."""
        result = self.ask(round=number, batch=batch, tokens=tokens, prompt=16)
        if number:
            self.speeds.setdefault(batch, []).append(result["generated"] / result["seconds"])


ROUNDS = ((1, 64), (8, 48))
"""Batch size, and tokens that each prompt is given."""

Speeds = dict[str, dict[int, list[float]]]


def measure(
    names: list[str], settings: dict[str, Any], rounds: int, sizes: tuple[tuple[int, int], ...] = ROUNDS
) -> Speeds:
    """Tokens per second by contestant and batch size, over one launch for each order of starting."""
    speeds: Speeds = {name: {} for name in names}
    for first in range(len(names)):
        for contestant in launch(names[first:] + names[:first], settings, rounds, sizes):
            for batch, found in contestant.speeds.items():
                speeds[contestant.name].setdefault(batch, []).extend(found)
    return speeds


def launch(
    names: list[str], settings: dict[str, Any], rounds: int, sizes: tuple[tuple[int, int], ...] = ROUNDS
) -> list[Contestant]:
    """Start the contestants one after the other, then let them take turns, in changing order."""
    with tempfile.TemporaryDirectory() as logs:
        contestants = []
        for name in names:
            contestants.append(Contestant(name, settings, Path(logs) / name))
            started = contestants[-1].answer()
            print(f"{name}: started in {started['start_s']:.1f} s", file=sys.stderr, flush=True)
        for batch, tokens in sizes:
            for number in range(rounds + 1):
                for contestant in contestants[number % len(names) :] + contestants[: number % len(names)]:
                    contestant.turn(number, batch, tokens)
        for contestant in contestants:
            contestant.stop()
            medians = {batch: round(statistics.median(found), 1) for batch, found in contestant.speeds.items()}
            print(contestant.name, medians, file=sys.stderr, flush=True)
    return contestants


def main() -> int:
    """Measure, print one table, and say whether tfbackend keeps up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--modes", nargs="+", default=["eager", "compiled"], choices=["eager", "compiled"])
    parser.add_argument("--contestants", nargs="+", default=list(CONTESTANTS), choices=list(CONTESTANTS))
    options = parser.parse_args()
    table = Table("mode", "batch", *(f"{n}, tok/s" for n in options.contestants))
    for name in options.contestants[1:]:
        table.add_column(f"{options.contestants[0]} / {name}")
    kept_up = True
    for mode in options.modes:
        settings = {
            "model": str(options.model),
            "max_model_len": 512,
            "max_num_seqs": 8,
            "enforce_eager": mode == "eager",
        }
        speeds = measure(options.contestants, settings, options.rounds)
        for batch in speeds[options.contestants[0]]:
            medians = [statistics.median(speeds[name][batch]) for name in options.contestants]
            ratios = [medians[0] / other for other in medians[1:]]
            kept_up &= all(ratio >= LEAST for ratio in ratios)
            table.add_row(mode, str(batch), *(f"{m:.1f}" for m in medians), *(f"{r:.3f}" for r in ratios))
    Console(width=110).print(table)
    return 0 if kept_up else 1


if __name__ == "__main__":
    sys.exit(main())
