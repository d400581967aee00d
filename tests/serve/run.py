"""Judges variants from the command line: ``python -m tests.serve.run llama qwen3 --engine-arg enforce_eager=False``."""

import argparse
import ast
import fnmatch
import sys
from dataclasses import replace
from typing import Any

from tests.serve.engine import ENGINE_TIMEOUT, Harness
from tests.serve.judge import judge
from tests.serve.tiny import ARCHITECTURES, VARIANTS


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _pairs(items: list[str]) -> dict[str, str]:
    return dict(item.split("=", 1) for item in items)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.serve.run", description=__doc__)
    parser.add_argument("names", nargs="*", help="variants or patterns (llama, 'gemma*'); 'main' for one each; all")
    parser.add_argument("--engine-arg", action="append", default=[], metavar="K=V", help="keyword argument of LLM")
    parser.add_argument("--env", action="append", default=[], metavar="K=V", help="environment of the engine")
    parser.add_argument("--disable", action="store_true", help="TFBACKEND_DISABLE=1: vLLM's own backend")
    parser.add_argument("--native", action="store_true", help="model_impl=vllm: vLLM's hand-written model")
    parser.add_argument("--sites", action="store_true", help="print the fused sites")
    parser.add_argument("--timeout", type=float, default=ENGINE_TIMEOUT)
    parser.add_argument("-v", "--log", action="store_true", help="print the end of the log of a failed engine")
    return parser.parse_args(argv)


def _select(patterns: list[str]) -> list[str]:
    if not patterns or patterns == ["main"]:
        return list(ARCHITECTURES if patterns else VARIANTS)
    chosen = [name for pattern in patterns for name in VARIANTS if fnmatch.fnmatch(name, pattern)]
    if not chosen:
        sys.exit(f"no variant matches {patterns}; there are {', '.join(VARIANTS)}")
    return list(dict.fromkeys(chosen))


def _run_one(harness: Harness, name: str, options: argparse.Namespace) -> bool:
    expected = harness.expected(name)
    engine_args = {key: _value(text) for key, text in _pairs(options.engine_arg).items()}
    if options.native:
        engine_args["model_impl"] = "vllm"
    env = _pairs(options.env) | ({"TFBACKEND_DISABLE": "1"} if options.disable else {})
    request = replace(harness.plain_request(name), engine_args=engine_args, timeout=options.timeout)
    outcome = harness.serve(request, env=env)
    if not outcome.ok:
        print(f"{name:26} REFUSED {outcome.seconds:5.1f} s  {' '.join(outcome.error.split())[:400]}", flush=True)
        if options.log:
            print(outcome.tail(60))
        return False
    batch = outcome.value.batches[0]
    verdict = judge(expected, batch.tokens, batch.logprobs)
    print(f"{name:26} {verdict}  {outcome.seconds:.1f} s  {outcome.value.model_class[0]}", flush=True)
    if options.sites:
        print(f"{'':26} {dict(sorted(outcome.value.inspected[0].items()))}")
    return verdict.equal


def main(argv: list[str]) -> int:
    """Print a verdict for each chosen variant; the exit status is 0 if all are equal."""
    options = _parse(argv)
    harness = Harness()
    try:
        results = [_run_one(harness, name, options) for name in _select(options.names)]
    finally:
        harness.close()
    print(f"{sum(results)} of {len(results)} equal")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
