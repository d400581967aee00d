"""Tokens per second through the embedding API on the CPU: tfbackend beside vLLM's hand-written model, alternating.

    python -m bench.pooling [--models bert roberta modernbert] [--texts N] [--rounds N] [--layers N] [--width N]
                            [--in-tree]

Texts of mixed lengths, as token ids, in one call of `LLM.embed`. The contestants take turns within one run, and are
started anew in the other order, since of two equal engines the one that was started first is slower for as long as it
lives. What counts is the ratio of medians; the exit status is 1 where one is below 0.97. `--in-tree` has vLLM's own
Transformers backend in the place of the hand-written model.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.contestant import answer, own_channel
from bench.process import CONTESTANTS, EngineProcess

LEAST = 0.97
OURS = "tfbackend"
VOCABULARY, LONGEST = 8192, 256


def write_checkpoint(model_type: str, folder: Path, layers: int, width: int) -> None:
    """A model of random weights, of a size that is served in truth."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import CONFIG_MAPPING, AutoModel, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](
        vocab_size=VOCABULARY, hidden_size=width, num_hidden_layers=layers, num_attention_heads=width // 32,
        intermediate_size=4 * width, max_position_embeddings=2 * LONGEST, pad_token_id=1, bos_token_id=0,
        eos_token_id=2, cls_token_id=0, sep_token_id=2,
    )  # fmt: skip
    AutoModel.from_config(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({str(n): n for n in range(VOCABULARY)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="1", eos_token="2").save_pretrained(folder)


def contestant(settings: dict[str, Any], texts: int) -> None:
    """Start an engine, then embed all texts for each line on standard input, and print the seconds."""
    channel = own_channel()
    from vllm import LLM

    drawn = random.Random(0)
    lengths = [drawn.randrange(4, LONGEST) for _ in range(texts)]
    prompts: Any = [{"prompt_token_ids": [drawn.randrange(3, VOCABULARY) for _ in range(n)]} for n in lengths]
    llm = LLM(**settings)
    answer(channel, tokens=sum(lengths))
    for _ in sys.stdin:
        start = time.perf_counter()
        llm.embed(prompts, use_tqdm=False)
        answer(channel, seconds=time.perf_counter() - start)


class Engine(EngineProcess):
    """A process with one engine.

    Attributes:
        tokens: of all texts together.
    """

    def __init__(self, name: str, folder: Path, texts: int, log: Path) -> None:
        extra, env = CONTESTANTS[name]
        settings = {"model": str(folder), "runner": "pooling", "dtype": "float32", "max_model_len": LONGEST, "seed": 0,
                    "enforce_eager": True, "disable_log_stats": True} | extra  # fmt: skip
        arguments = ["bench.pooling", "--contestant", json.dumps(settings), "--texts", str(texts)]
        super().__init__(name, arguments, env, log)
        self.tokens = int(self.answer()["tokens"])

    def turn(self) -> float:
        """Tokens per second of one pass over all texts."""
        return self.tokens / float(self.ask()["seconds"])


def measure(names: list[str], folder: Path, texts: int, rounds: int) -> dict[str, list[float]]:
    """Tokens per second of each contestant, over one launch in each order; the first pass of each warms up."""
    speeds: dict[str, list[float]] = {name: [] for name in names}
    for order in (names, names[::-1]):
        with tempfile.TemporaryDirectory() as logs:
            engines = [Engine(name, folder, texts, Path(logs) / name) for name in order]
            for number in range(rounds + 1):
                for engine in engines[number % 2 :] + engines[: number % 2]:
                    speed = engine.turn()
                    speeds[engine.name] += [speed] if number else []
            for engine in engines:
                engine.stop()
    return speeds


def main() -> int:
    """Measure each model, print a line for it, and say whether tfbackend keeps up."""
    parser = argparse.ArgumentParser(prog="python -m bench.pooling", description=__doc__)
    parser.add_argument("--models", nargs="+", default=["bert", "roberta", "modernbert"])
    parser.add_argument("--texts", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--in-tree", action="store_true", help="against vLLM's own Transformers backend")
    parser.add_argument("--contestant", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contestant:
        contestant(json.loads(options.contestant), options.texts)
        return 0
    names, slow = [OURS, "in-tree" if options.in_tree else "native"], False
    for model_type in options.models:
        with tempfile.TemporaryDirectory() as folder:
            write_checkpoint(model_type, Path(folder), options.layers, options.width)
            speeds = measure(names, Path(folder), options.texts, options.rounds)
        medians = [statistics.median(speeds[name]) for name in names]
        ratio = medians[0] / medians[1]
        slow |= ratio < LEAST
        figures = ", ".join(f"{name} {median:,.0f} tokens/s" for name, median in zip(names, medians, strict=True))
        print(f"{model_type:12} {figures}, ratio {ratio:.3f}", flush=True)
    return int(slow)


if __name__ == "__main__":
    sys.exit(main())
