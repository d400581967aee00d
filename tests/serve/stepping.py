"""Engines driven step by step: requests that are aborted half way, and a pool so small that some are preempted."""

from dataclasses import dataclass
from typing import Any

from tests.serve.engine import DEFAULT_ARGS


@dataclass(frozen=True)
class Stepped:
    """What an engine gave for the requests that it finished, in the order they were given: tokens and their
    log-probabilities; how many were aborted with something generated, and how often a request was preempted."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    aborted: int
    preempted: int


def run(
    folder: str,
    prompts: list[list[int]],
    max_tokens: int,
    engine_args: dict[str, Any],
    doomed: tuple[int, ...] = (),
    arrivals: tuple[int, ...] = (),
) -> Stepped:
    """Serve the prompts; requests at the places ``doomed`` are aborted once they have generated two tokens.

    ``arrivals`` has the step before which each request comes, in order; without it all come at once. Runs in a forked
    child, with the engine in its own process.
    """
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    llm = LLM(model=folder, **(DEFAULT_ARGS | engine_args))
    engine = llm.llm_engine
    preemptions = _count_preemptions(engine.engine_core.engine_core.scheduler)
    params = SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        logprobs=2,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.CUMULATIVE,
    )
    waiting = [*enumerate(arrivals or [0] * len(prompts))]
    finished: dict[int, Any] = {}
    gone: set[int] = set()
    step = 0
    while waiting or engine.has_unfinished_requests():
        while waiting and waiting[0][1] <= step:
            index, _ = waiting.pop(0)
            engine.add_request(str(index), {"prompt_token_ids": list(prompts[index])}, params.clone())
        step += 1
        for output in engine.step() if engine.has_unfinished_requests() else ():
            index = int(output.request_id)
            if index in doomed and index not in gone and len(output.outputs[0].token_ids) >= 2:
                engine.abort_request([output.request_id])
                gone.add(index)
            elif output.finished and index not in gone:
                finished[index] = output.outputs[0]
    outputs = [finished[index] for index in sorted(finished)]
    tokens = [list(output.token_ids) for output in outputs]
    logprobs = [[entry[t].logprob for entry, t in zip(o.logprobs, o.token_ids, strict=True)] for o in outputs]
    return Stepped(tokens, logprobs, len(gone), len(preemptions))


def _count_preemptions(scheduler: Any) -> list[str]:
    original, seen = scheduler._preempt_request, []

    def preempt(request: Any, *args: Any, **keywords: Any) -> Any:
        seen.append(request.request_id)
        return original(request, *args, **keywords)

    scheduler._preempt_request = preempt
    return seen
