"""Every kind of rotary embedding, at prompts beyond the length that it was first trained for: scaling shows there most.

The kinds of scaling on one architecture; then how much of a head is turned, which elements are paired, and layers that
have an embedding each or none.
"""

from dataclasses import replace
from typing import Any

import pytest

from tests.serve.configs import LLAMA3_ROPE, VARIANTS, YARN_ROPE, F, S, Variant
from tests.serve.engine import MAX_TOKENS, OURS, Harness, Request, Served
from tests.serve.judge import LOGPROB, SAME_COMPUTATION, judge
from tests.serve.matrix.checkpoint import make_and_ask as ask_matrix
from tests.serve.oracle import make_and_ask, sensitivities
from tests.serve.probes import fixed_ropes
from tests.serve.tiny import make_prompts, with_fields

pytestmark = pytest.mark.engine

ORIGINAL = 64
LENGTHS = (ORIGINAL - 1, ORIGINAL + 1, 130, 200)
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
_LINEAR = PLAIN | {"rope_type": "linear", "factor": 4.0}
_ATTENTION_FACTOR = YARN_ROPE | {"attention_factor": 1.4, "truncate": False}
_DYNAMIC = PLAIN | {"rope_type": "dynamic", "factor": 4.0}
_PROPORTIONAL = PLAIN | {"rope_type": "proportional", "partial_rotary_factor": 0.25, "factor": 2.0}
_LONG = VARIANTS["phi3-longrope"].fields["rope_parameters"] | {"original_max_position_embeddings": ORIGINAL}


def _variant(name: str, base: str = "llama", **fields: object) -> Variant:
    shows = {} if name.startswith("dynamic") or base != "llama" else {"rope_parameters": PLAIN}
    return replace(with_fields(VARIANTS[base], **fields), name=f"{base}-past-{name}", shows=shows)


EXACT = {
    "llama3": _variant("llama3", rope_parameters=LLAMA3_ROPE),
    "yarn": _variant("yarn", rope_parameters=YARN_ROPE),
    "yarn-factor": _variant("yarn-factor", rope_parameters=_ATTENTION_FACTOR),
    "linear": _variant("linear", rope_parameters=_LINEAR, max_position_embeddings=4 * ORIGINAL),
    "dynamic": _variant("dynamic", rope_parameters=_DYNAMIC, max_position_embeddings=256),
    "default": replace(
        _variant("default", rope_parameters=PLAIN), shows={"rope_parameters": PLAIN | {"rope_theta": 9e3}}
    ),
    "proportional": _variant("proportional", rope_parameters=_PROPORTIONAL),
}


def _shaped(base: str, rope: dict[str, Any], **shows: Any) -> Variant:
    """The architecture `base` with another embedding; it says other things without scaling and with each of `shows`."""
    share = {key: value for key, value in rope.items() if key == "partial_rotary_factor"}
    plain = dict.fromkeys(rope, PLAIN) if F in rope else PLAIN | share
    fields = {"rope_parameters": rope, "max_position_embeddings": 4 * ORIGINAL}
    return replace(with_fields(VARIANTS[base], **fields), name=f"{base}-past", shows={"rope_parameters": plain} | shows)


_HALF = {"partial_rotary_factor": 0.5}
SHAPED = {
    "half of each head": _shaped("phi", YARN_ROPE | _HALF),
    "half of each head, neighbours paired": _shaped("glm", YARN_ROPE | _HALF),
    "neighbours paired": _shaped("cohere", YARN_ROPE),
    "none on every other layer": _shaped("smollm3", YARN_ROPE, no_rope_layers=[1] * 4),
    "neighbours paired, none on layers without a window": _shaped("cohere2", LLAMA3_ROPE, layer_types=[S] * 4),
    "one scaling for each type of layer": _shaped("olmo3", {F: YARN_ROPE, S: _LINEAR}),
    "scaled on layers without a window": _shaped("gemma3_text", {F: LLAMA3_ROPE, S: PLAIN | {"rope_theta": 50.0}}),
}
_LENGTHS = {"max_position_embeddings": 4 * ORIGINAL, "original_max_position_embeddings": ORIGINAL}
LONGROPE = _variant("longrope", "phi3-longrope", rope_parameters=_LONG, **_LENGTHS)
SHORT = _variant("dynamic-short", rope_parameters=_DYNAMIC, max_position_embeddings=ORIGINAL)


def _serve(harness: Harness, variant: Variant, lengths: tuple[int, ...], max_model_len: int = 256) -> Served:
    """Serve prompts of these lengths and judge them by Transformers."""
    prompts = make_prompts(lengths=lengths, seed=23)
    folder = harness.checkpoint(variant.name)
    expected = harness.ask_oracle(make_and_ask, variant, folder, prompts, MAX_TOKENS)
    args = {"max_model_len": max_model_len}
    request = Request(folder, (tuple(map(tuple, prompts)),), engine_args=args, inspect=fixed_ropes)
    outcome = harness.serve(request)
    assert outcome.ok, f"{outcome.error}\n{outcome.tail()}"
    served = outcome.value
    assert set(served.model_class) == {OURS}
    (batch,) = served.batches
    verdict = judge(expected, batch.tokens, batch.logprobs, within=SAME_COMPUTATION)
    assert verdict.equal, verdict
    if variant.shows:
        moved = harness.ask_oracle(sensitivities, variant, folder, prompts, expected)
        assert min(moved.values()) > 2 * LOGPROB, f"without its scaling it would say the same: {moved}"
    return served


@pytest.mark.parametrize("name", EXACT)
def test_scaling_that_does_not_depend_on_the_length(harness: Harness, name: str) -> None:
    served = _serve(harness, EXACT[name], LENGTHS)
    assert all(exact for exact, _ in served.inspected[0])


@pytest.mark.parametrize("shape", SHAPED)
def test_shapes_of_rotation(harness: Harness, shape: str) -> None:
    _serve(harness, SHAPED[shape], LENGTHS)


def test_proportional_on_one_type_of_layer(harness: Harness) -> None:
    """As the architecture has it that proportional frequencies were made for."""
    prompts, folder = make_prompts(lengths=LENGTHS, seed=23), harness.checkpoint("gemma4_text")
    expected = harness.ask_oracle(ask_matrix, "gemma4_text", folder, prompts, MAX_TOKENS)
    outcome = harness.serve(Request(folder, (tuple(map(tuple, prompts)),)))
    assert outcome.ok, f"{outcome.error}\n{outcome.tail()}"
    (batch,) = outcome.value.batches
    verdict = judge(expected.answers, batch.tokens, batch.logprobs, within=SAME_COMPUTATION)
    assert verdict.equal, verdict


def test_longrope_beyond_its_original_length(harness: Harness) -> None:
    """All contexts have the long factors then, and requests beyond the original length have them in Transformers."""
    ((exact, said),) = _serve(harness, LONGROPE, (ORIGINAL + 1, 130, 200)).inspected[0]
    assert not exact, "shorter requests have the short factors in Transformers"
    assert "results differ" in said


def test_longrope_within_its_original_length(harness: Harness) -> None:
    ((exact, _),) = _serve(harness, LONGROPE, (3, ORIGINAL - MAX_TOKENS - 1), max_model_len=ORIGINAL).inspected[0]
    assert exact


def test_dynamic_scaling_beyond_its_original_length_is_said_to_differ(harness: Harness) -> None:
    """Transformers rescales with every token of a request; keys in a cache cannot follow."""
    folder, prompts = harness.checkpoint(SHORT.name), make_prompts(lengths=(3,))
    harness.ask_oracle(make_and_ask, SHORT, folder, prompts, MAX_TOKENS)
    outcome = harness.serve(Request(folder, (tuple(map(tuple, prompts)),), inspect=fixed_ropes))
    assert outcome.ok, f"{outcome.error}\n{outcome.tail()}"
    ((exact, said),) = outcome.value.inspected[0]
    assert not exact
    assert "results differ" in said
    _serve(harness, SHORT, (3, ORIGINAL - MAX_TOKENS - 1), max_model_len=ORIGINAL)
