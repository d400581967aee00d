"""The rungs that compare with Transformers tell permuted experts. Not end to end: the engine is a stand-in, for no
mixture of experts is served yet."""

from typing import Any

import pytest

from tests.verification import experts, models
from tests.verification.planting import Planter
from tfbackend.verification.answers import EngineRequest, Served
from tfbackend.verification.processes import Outcome
from tfbackend.verification.prompts import make_prompts
from tfbackend.verification.rungs import FAIL, PASS
from tfbackend.verification.running import Running


class StandIn:
    """Answers as Transformers does, with its experts in order or not, in place of an engine."""

    def __init__(self, planter: Planter, permuted: bool) -> None:
        self._planter, self._permuted = planter, permuted

    def ask(self, *args: Any) -> Outcome:
        """The oracle."""
        return self._planter.ask(*args)

    def call_oracle(self, *args: Any) -> Outcome:
        """Anything else of Transformers."""
        return self._planter.call_oracle(*args)

    def serve(self, request: EngineRequest) -> Outcome:
        """Each batch as the stand-in answers it."""
        prompts = tuple(prompt for batch in request.batches for prompt in batch)
        args = (experts.answers, request.model, prompts, request.max_tokens, self._permuted)
        outcome = self._planter.call_oracle(*args)
        assert outcome.ok, outcome.error
        batches = tuple((answer,) for answer in outcome.value)
        served = Served(batches, ((0,),) * len(batches), "tfbackend.models.TransformersForCausalLM")
        return Outcome(served, "", "", outcome.seconds)


@pytest.mark.parametrize(("permuted", "verdict"), [(False, PASS), (True, FAIL)])
def test_expert_order(planter: Planter, permuted: bool, verdict: str) -> None:
    folder = models.make("qwen3_moe", planter)
    running = Running(folder, make_prompts(500, [], 512, 0), StandIn(planter, permuted), 512, quick=True)
    assert running.loads().verdict == PASS
    assert running.topk().verdict == verdict, running.topk()
    assert running.greedy().verdict == verdict, running.greedy()
