import json

import pytest

from tfbackend.errors import MissingTensorError, ShapeMismatchError, UnexpectedTensorError
from tfbackend.weights import Ledger, Placement
from tfbackend.weights.drops import drop

QKV = "model.layers.0.self_attn.qkv_proj.weight"
SHARDS = {QKV: ("q", "k", "v")}
NAMES = {(QKV, s): f"model.layers.0.self_attn.{s}_proj.weight" for s in "qkv"} | {
    ("model.norm.weight", None): "model.norm.weight"
}


def place(target: str, shard=None, source: str = "", sources=()) -> Placement:
    name = source or NAMES.get((target, shard), target)
    return Placement(target, shard, name, name, sources=sources)


def filled(*shards) -> Ledger:
    ledger = Ledger(NAMES)
    for shard in shards:
        assert ledger.claim(place(QKV, shard))
    return ledger


def test_complete_ledger_passes():
    ledger = filled("q", "k", "v")
    ledger.claim(place("model.norm.weight"))
    ledger.check({**SHARDS, "model.norm.weight": ()})
    ledger.check({**SHARDS, "model.norm.weight": (None,)})


def test_whole_tensor_fills_all_shards():
    filled(None).check(SHARDS)


def test_missing_shard_names_parameter_shard_tensor_and_remedy():
    with pytest.raises(MissingTensorError) as caught:
        filled("q", "v").check(SHARDS)
    error = caught.value
    assert error.where == f"{QKV} (shard k)"
    assert error.needed == "model.layers.0.self_attn.k_proj.weight"
    assert "nearest: model.layers.0.self_attn.v_proj.weight" in str(error)
    assert "shard file" in error.remedy


def test_renamed_tensor_is_offered_as_the_nearest():
    ledger = filled("q", "v")
    ledger.unexpected("model.layers.0.self_attn.k_prj.weight")
    with pytest.raises(MissingTensorError, match=r"nearest: model.layers.0.self_attn.k_prj.weight") as caught:
        ledger.check(SHARDS)
    assert "1 tensor without one: model.layers.0.self_attn.k_prj.weight" in caught.value.found
    assert "under another name" in caught.value.remedy


def test_missing_parameter_that_no_tensor_leads_to():
    with pytest.raises(MissingTensorError, match="no tensor has this place"):
        Ledger().check({"model.made_up": ()})


@pytest.mark.parametrize(("first", "second"), [("q", "q"), (None, "q"), ("q", None), (None, None)])
def test_filled_twice_names_both_sources(first, second):
    ledger = Ledger(NAMES)
    assert ledger.claim(place(QKV, first, "one.weight"))
    assert not ledger.claim(place(QKV, second, "other.weight"))
    with pytest.raises(UnexpectedTensorError, match=r"other.weight and one.weight both go to"):
        ledger.check({})


def test_zero_and_none_are_different_shards():
    ledger = Ledger()
    ledger.claim(place("gate_up", 0, "gate"))
    with pytest.raises(MissingTensorError, match=r"gate_up \(shard 1\)"):
        ledger.check({"gate_up": (0, 1)})


def test_unexpected_tensor_names_nearest():
    ledger = Ledger(NAMES)
    ledger.unexpected("model.norms.weight")
    with pytest.raises(UnexpectedTensorError, match=r"model.norms.weight has no place; nearest.*: model.norm.weight"):
        ledger.check({})


def test_misfit_shows_both_sides():
    ledger = Ledger(NAMES)
    ledger.misfit("model.norm.weight", "model.norm.weight", found="(3,)", needed="(4,)")
    with pytest.raises(ShapeMismatchError, match=r"found \(3,\), needed \(4,\)") as caught:
        ledger.check({"model.norm.weight": ()})
    assert (caught.value.found, caught.value.needed) == ("(3,)", "(4,)")
    assert "config.json" in caught.value.remedy


def test_many_problems_are_shown_ten_at_a_time():
    ledger = Ledger()
    for i in range(13):
        ledger.unexpected(f"extra.{i}")
    with pytest.raises(UnexpectedTensorError) as caught:
        ledger.check({})
    message = str(caught.value)
    assert message.startswith("13 tensors of the checkpoint too many")
    assert "extra.9 " in message
    assert "extra.10" not in message
    assert "and 3 more" in message


def test_summary_and_json():
    ledger = filled("q", "k", "v")
    ledger.claim(place("model.experts", sources=("a", "b")))
    ledger.drop("lm_head.weight", drop("tied-copy"))
    summary = ledger.summary()
    assert "5 tensors filled 2 parameters" in summary
    assert "1 of them stacked, from 3 shards" in summary
    assert "2 tensors went through a conversion" in summary
    assert "1 tensor dropped, tied-copy: lm_head.weight" in summary
    plain = json.loads(json.dumps(ledger.as_dict()))
    assert plain["placed"]["model.experts"] == [{"shard": None, "tensors": ["a", "b"]}]
    assert plain["dropped"]["tied-copy"]["tensors"] == ["lm_head.weight"]
