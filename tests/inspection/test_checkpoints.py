"""Headers and ledger: whole checkpoints, and one fault at a time."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tfbackend.errors import CheckpointError
from tfbackend.inspection.examine import Request, inspect_model
from tfbackend.inspection.headers import INDEX, read_folder

Q = "model.layers.1.self_attn.q_proj.weight"


def look(folder, **options):
    return inspect_model(Request(str(folder), **options))


@pytest.fixture
def whole(tiny_llama, tmp_path):
    """A copy of the tiny model with all its tensors in one file."""
    tensors = {}
    for file in tiny_llama.glob("*.safetensors"):
        tensors |= load_file(file)
    shutil.copy(tiny_llama / "config.json", tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def change(whole):
    """Rewrites the file with some tensors changed; None takes one away."""

    def rewrite(**changes):
        tensors = load_file(whole / "model.safetensors")
        for name, tensor in changes.items():
            tensors.pop(name, None)
            if tensor is not None:
                tensors[name] = tensor
        save_file(tensors, whole / "model.safetensors")
        return whole

    return rewrite


def test_shards_and_their_index(tiny_llama):
    assert len(list(tiny_llama.glob("*.safetensors"))) > 1
    found = look(tiny_llama)
    assert found.status == 0
    assert found.accounts.complete
    # 2 layers of 7 matrices and 2 norms, embedding, final norm, head
    assert found.accounts.counts == {"placed": 2 * 9 + 3}
    assert found.headers.nbytes == 2 * sum(p.count for p in found.parameters)


def test_each_tensor_has_the_shape_and_dtype_of_its_file(tiny_llama):
    wanted = {}
    for file in tiny_llama.glob("*.safetensors"):
        wanted |= {name: (tuple(t.shape), "BF16", file.name) for name, t in load_file(file).items()}
    assert {t.name: (t.shape, t.dtype, t.file) for t in read_folder(tiny_llama).tensors} == wanted


def test_a_tensor_lands_in_its_shard(tiny_llama):
    places = {entry.tensor.name: entry.place for entry in look(tiny_llama).accounts.entries}
    assert places[Q] == "model.layers.1.self_attn.qkv_proj.weight (shard q)"
    assert places["model.layers.0.mlp.up_proj.weight"] == "model.layers.0.mlp.gate_up_proj.weight (shard 1)"
    assert places["model.norm.weight"] == "model.norm.weight"


def test_no_weights_at_all(whole):
    (whole / "model.safetensors").unlink()
    found = look(whole)
    assert (found.status, found.headers, found.accounts) == (0, None, None)


def test_a_missing_shard_file(tiny_llama, tmp_path):
    shutil.copytree(tiny_llama, tmp_path, dirs_exist_ok=True)
    gone = sorted(tmp_path.glob("*.safetensors"))[1]
    gone.unlink()
    found = look(tmp_path)
    assert found.status == 2
    assert any(gone.name in str(finding) and INDEX in str(finding) for finding in found.problems)
    assert any("would stay unfilled" in finding.what for finding in found.problems)


def test_an_index_alone_gives_names(tiny_llama, tmp_path):
    for name in ("config.json", INDEX):
        shutil.copy(tiny_llama / name, tmp_path)
    found = look(tmp_path)
    assert found.status == 0
    assert found.accounts.complete
    assert "shapes are not" in found.headers.note


def test_an_index_that_is_no_json(whole):
    (whole / INDEX).write_text('{"weight_map": {"a"')
    with pytest.raises(CheckpointError, match="index"):
        look(whole)


def test_a_truncated_file(whole):
    path = whole / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    found = look(whole)
    assert found.status == 2
    assert "damaged or was not downloaded completely" in found.problems[0].what


def test_pickled_weights_are_not_run(whole):
    (whole / "model.safetensors").unlink()
    (whole / "pytorch_model.bin").write_bytes(b"never read")
    found = look(whole)
    assert found.status == 2
    assert "pickled (pytorch_model.bin)" in found.problems[0].what


def test_a_tensor_that_is_missing(change):
    found = look(change(**{Q: None}))
    assert found.status == 2
    [gap] = found.accounts.gaps
    assert (gap.place, gap.wanted) == ("model.layers.1.self_attn.qkv_proj.weight (shard q)", Q)


def test_a_tensor_that_nothing_takes(change):
    found = look(change(**{"model.layers.2.mlp.up_proj.weight": torch.zeros(96, 64)}))
    assert found.status == 2
    assert found.accounts.counts["unexpected"] == 1
    assert "no rule drops it" in str(found.problems[0])


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (torch.zeros(64, 32), r"found \(64, 32\), needed \(64, 64\)"),
        (torch.zeros(64, 64, dtype=torch.int8), "found I8, needed torch.bfloat16 or another float dtype"),
    ],
    ids=["shape", "dtype"],
)
def test_a_tensor_that_does_not_fit(change, tensor, says):
    found = look(change(**{Q: tensor}))
    assert found.status == 2
    [entry] = [e for e in found.accounts.entries if e.outcome == "misfit"]
    assert entry.tensor.name == Q
    import re

    assert re.search(says, entry.note)


def test_another_float_dtype_fits(change):
    assert look(change(**{Q: torch.zeros(64, 64, dtype=torch.float32)})).status == 0


def test_two_tensors_for_one_place(change):
    found = look(change(**{f"_orig_mod.{Q}": torch.zeros(64, 64)}))
    assert found.status == 2
    assert found.accounts.counts["duplicate"] == 1


def test_a_dropped_tensor_names_its_rule(change):
    found = look(change(**{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    assert found.status == 0
    [entry] = [e for e in found.accounts.entries if e.outcome == "dropped"]
    assert entry.note == "legacy-buffer"
    assert "earlier release" in found.accounts.rules["legacy-buffer"]


def test_a_copy_of_a_tied_head(whole):
    config = json.loads((whole / "config.json").read_text())
    (whole / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    found = look(whole)
    assert found.status == 0
    [entry] = [e for e in found.accounts.entries if e.outcome == "dropped"]
    assert (entry.tensor.name, entry.note) == ("lm_head.weight", "tied-copy")
    head = found.parameters[-1]
    assert (head.name, head.tied_to, head.rank_bytes) == ("lm_head.weight", "model.embed_tokens.weight", 0)


def test_experts_go_through_the_conversion_of_transformers(tiny_moe):
    found = look(tiny_moe)
    assert found.accounts.complete, found.accounts.gaps
    assert not {"unexpected", "misfit", "duplicate"} & found.accounts.counts.keys()
