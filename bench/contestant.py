"""One engine in a process of its own, that generates when told to: `python -m bench.contestant '{"model": ...}'`.

Lines of JSON on standard input are rounds, lines on standard output are their results; the log goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def own_channel() -> Any:
    """Standard output for answers alone: all else that is printed goes to the log."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return channel


def answer(channel: Any, **content: Any) -> None:
    """Write one."""
    channel.write(json.dumps(content) + "\n")
    channel.flush()


def main(settings: dict[str, Any]) -> None:
    """Start the engine, then answer rounds {"batch": n, "tokens": m, "prompt": k} until standard input ends."""
    channel = own_channel()
    started = time.perf_counter()
    from vllm import LLM, SamplingParams, TokensPrompt

    imported = time.perf_counter()
    llm = LLM(**settings)
    ready = time.perf_counter()
    answer(channel, import_s=imported - started, start_s=ready - imported)
    for line in sys.stdin:
        turn = json.loads(line)
        prompts = [
            TokensPrompt(prompt_token_ids=[1000 + 17 * i + j + turn["round"] for j in range(turn["prompt"])])
            for i in range(turn["batch"])
        ]
        sampling = SamplingParams(max_tokens=turn["tokens"], temperature=0.0, ignore_eos=True, detokenize=False)
        begun = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - begun
        answer(channel, seconds=seconds, generated=sum(len(o.outputs[0].token_ids) for o in outputs))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
