"""Serves one architecture with one backend and says what became of it."""

import re
from dataclasses import dataclass, replace
from typing import Any

from tests.serve.engine import MAX_TOKENS, Harness, Request, Served
from tests.serve.fused import count_sites
from tests.serve.judge import judge
from tests.serve.matrix.checkpoint import Expected, make_and_ask
from tests.serve.matrix.results import Result
from tests.serve.tiny import make_prompts
from tests.serve.warm import Outcome

ENV = {"ours": {}, "intree": {"TFBACKEND_DISABLE": "1"}}
PREFIX = {"ours": "tfbackend.models.", "intree": "vllm.model_executor.models.transformers."}
# An error of these types is an answer to the user; any other is a crash. Checkpoint errors are no answer here: the
# checkpoint is Transformers' own.
_REFUSALS = {
    "ours": {"UnsupportedModelError", "ConfigError", "VersionError", "ValidationError"},
    "intree": {"ValueError", "ValidationError", "NotImplementedError"},
}
# The process that the engine runs in is forked by tfbackend.verification, whoever serves.
_FRAME_OF_OURS = re.compile(r'File "[^"]*/tfbackend/(?!verification/)\w')
_FOLDERS = re.compile(r"/[^\s'\"]*/(site-packages|tfbackend-serve-\w+)/")
_FRAME_OF_VLLM = re.compile(r'File "[^"]*/vllm/model_executor/models/transformers/')


@dataclass(frozen=True)
class Look:
    """What is asked of the live model: fused sites, and of ours the plan."""

    sites: dict[str, int]
    plan: dict[str, int]
    misses: tuple[str, ...]


def look(model: Any) -> Look:
    """Count the fused sites and read the plan. Runs in the engine's process."""
    plan = getattr(model, "plan", None)
    if not hasattr(plan, "rewrites"):
        return Look(count_sites(model), {}, ())
    misses = tuple(dict.fromkeys(f"{miss.fuser}: {miss.reason}" for miss in plan.misses))
    return Look(count_sites(model), dict(sorted(plan.counts.items())), misses)


def expect(harness: Harness, name: str) -> Expected | str:
    """The oracle's answers, or in one line why there are none."""
    try:
        return harness.ask_oracle(make_and_ask, name, harness.checkpoint(name), make_prompts(), MAX_TOKENS)
    except RuntimeError as error:
        return _one_line(str(error).splitlines()[0])


def attempt(
    harness: Harness, name: str, expected: Expected, backend: str, timeout: float, *, compiled: bool = False
) -> Result:
    """Start an engine on the checkpoint of the architecture and judge what it says."""
    prompts = tuple(map(tuple, make_prompts()))
    args = {"enforce_eager": not compiled}
    request = Request(harness.checkpoint(name), (prompts,), engine_args=args, inspect=look, timeout=timeout)
    outcome = harness.serve(request, env=ENV[backend])
    if not outcome.ok:
        return failure(outcome, backend)
    served: Served = outcome.value
    seen: Look = served.inspected[0]
    batch = served.batches[0]
    verdict = judge(expected.answers, batch.tokens, batch.logprobs)
    result = Result(
        verdict="equal" if verdict.equal else "wrong",
        reason=verdict.fault,
        served_by=served.model_class[0],
        sites=dict(sorted(seen.sites.items())),
        plan=seen.plan,
        misses=list(seen.misses),
        seconds=round(outcome.seconds, 1),
    )
    if not result.served_by.startswith(PREFIX[backend]):
        # Not this backend's doing, whatever the answers were.
        return replace(result, verdict="refused", reason=f"left to {result.served_by}", sites={}, plan={}, misses=[])
    return result


def failure(outcome: Outcome, backend: str) -> Result:
    """The result of an engine that did not come up: refused or crashed, and whose model class it was."""
    kind = outcome.error.partition(":")[0].rsplit(".", 1)[-1].strip()
    verdict = "refused" if kind in _REFUSALS[backend] else "crashed"
    reason = _one_line(outcome.error)
    if backend == "ours" and _FRAME_OF_VLLM.search(outcome.log) and not _FRAME_OF_OURS.search(outcome.log):
        reason = f"left to vLLM's own backend, which says: {reason}"
    return Result(verdict, reason, seconds=round(outcome.seconds, 1))


def _one_line(text: str) -> str:
    """The text without line breaks and the folders of this machine; of pydantic's wrapping of an error, the error."""
    line = _FOLDERS.sub("", " ".join(text.split()))
    wrapped = re.search(r"Value error, (.*?) \[type=", line)
    return wrapped.group(1) if wrapped else line
