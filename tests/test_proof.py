"""The proof: what its cache depends on, what a budget of nothing leaves unproven, and what it compares."""

import importlib.util
import json
import sys

import pytest
import torch
from torch import nn

from tests.fusers.test_glu import GLU
from tests.fusers.test_qkv import Attention
from tests.sites import WIDTH, decide
from tfbackend.errors import PlanConflictError
from tfbackend.graph.kinds import own_state
from tfbackend.graph.trial import materialise
from tfbackend.layerspecs import MergedLinearSpec
from tfbackend.proof import prove

FILE = """
from torch import nn

def helper(x):
    return x * {factor}

class Parent(nn.Module):
    def forward(self, x):
        return helper(self.a(x)) + self.b(x)
"""


def load(tmp_path, factor):
    path = tmp_path / f"remote_{factor}.py"
    path.write_text(FILE.format(factor=factor))
    spec = importlib.util.spec_from_file_location("remote_model", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["remote_model"] = module
    spec.loader.exec_module(module)

    class Child(module.Parent):
        def __init__(self, width=8, eps=1.0):
            super().__init__()
            self.a, self.b, self.eps = nn.Linear(WIDTH, width), nn.Linear(WIDTH, width), eps

    return Child


def keys(directory):
    """Names of the results kept, but for the one of the embedding that every tiny model has."""
    embedding = directory.parent / "embedding"
    decide(nn.Identity, directory=embedding)
    return {p.name for p in directory.glob("*.json")} - {p.name for p in embedding.glob("*.json")}


def test_second_start_reads_what_the_first_proved(tmp_path):
    assert decide(GLU, directory=tmp_path).rewrite("glu")
    first = keys(tmp_path)
    assert len(first) == 1
    again = decide(GLU, directory=tmp_path, budget=0.0)
    assert keys(tmp_path) == first
    assert again.unproven == [], "what is remembered costs no budget"
    assert again.rewrite("glu")


def test_remembered_failure_stays_a_failure(tmp_path):
    decide(GLU, directory=tmp_path)
    (name,) = keys(tmp_path)
    (tmp_path / name).write_text(json.dumps({"problem": "as an earlier run found"}))
    assert decide(GLU, directory=tmp_path).reason("glu") == "not used, its proof failed: as an earlier run found"


def test_key_follows_source_shapes_numbers_and_classes_of_children(tmp_path):
    cache = tmp_path / "proofs"
    base = load(tmp_path, 1)
    builds = [
        base,
        lambda: base(width=9),
        lambda: base(eps=2.0),
        load(tmp_path, 3),  # a helper beside the base class has changed, nothing in the class itself
        lambda: GLU(act="silu"),
        lambda: GLU(act="gelu"),
    ]
    for count, build in enumerate(builds, start=1):
        decide(build, directory=cache)
        assert len(keys(cache)) == count
    for build in builds:
        decide(build, directory=cache)
    assert len(keys(cache)) == len(builds)
    del sys.modules["remote_model"]


def test_key_is_the_same_in_another_process(tmp_path):
    import subprocess

    code = (
        "import sys; sys.path.insert(0, '.')\n"
        "from pathlib import Path\n"
        "from tests.sites import decide\n"
        "from tests.fusers.test_qkv import Attention\n"
        "decide(Attention, directory=Path(sys.argv[1]))\n"
    )
    decide(Attention, directory=tmp_path)
    here = keys(tmp_path)
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, env=_other_hashes())
    assert keys(tmp_path) == here


def _other_hashes():
    import os

    return {**os.environ, "PYTHONHASHSEED": "12345"}


def test_budget_of_nothing_lists_all_as_unproven():
    plan = decide(GLU, Attention, budget=-1.0)
    assert all("proof budget" in text for text in plan.unproven)
    assert [text.split(":")[0] for text in plan.unproven] == ["embed", "site", "others.0"]


def test_dropped_bias_is_found_out():
    """A rewrite that loses a bias gives other values, unless the bias happens to be zero: parameters are random."""
    from dataclasses import replace

    plan = decide(lambda: GLU(bias=(True, True)))
    good, site = plan.rewrite("glu"), plan.planner.sites["site"]
    edit = good.edits[0]
    module = site.module
    lost = replace(good, edits=(replace(edit, text="self.act_and_mul(self.gate_up_proj(x) * 1 - 0.5)"),))
    assert "outputs differ" in prove(site, [lost])
    assert materialise(module, torch.Generator().manual_seed(0)).gate.bias.abs().min() > 0


@pytest.mark.parametrize("parts", [(47, 49), (48, 47)])
def test_wrong_sizes_are_found_out(parts):
    from dataclasses import replace

    plan = decide(GLU)
    good, site = plan.rewrite("glu"), plan.planner.sites["site"]
    wrong = replace(good, children=(("gate_up_proj", MergedLinearSpec(WIDTH, parts, False)), good.children[1]))
    answer = prove(site, [wrong])
    assert (answer == "") == (sum(parts) == 96), "halves of one width are the weights' affair, their sum is the proof's"


def test_two_edits_of_one_place_are_a_conflict_and_no_miss():
    from dataclasses import replace

    plan = decide(GLU)
    good, site = plan.rewrite("glu"), plan.planner.sites["site"]
    with pytest.raises(PlanConflictError):
        prove(site, [good, replace(good, children=(), removes=(), fuser="other")])


def test_wide_linears_are_stood_in_for_and_behave_alike():
    with torch.device("meta"):
        wide = nn.Sequential(nn.Linear(4096, 2048), nn.Linear(8, 8))
    made = materialise(wide, torch.Generator().manual_seed(0))
    assert sum(p.numel() for p in made[0].parameters()) < 4096 * 2048 // 50
    assert made[0](torch.randn(2, 4096)).shape == (2, 2048)
    assert type(made[1]) is nn.Linear


def test_huge_parameters_have_distinct_rows_in_the_memory_of_few():
    with torch.device("meta"):
        table = nn.Embedding(200_000, 128)
        experts = nn.Module()
        experts.weight = nn.Parameter(torch.empty(32, 1024, 1024))
    rows = materialise(nn.Sequential(table), torch.Generator().manual_seed(0))[0].weight
    assert rows.shape == (200_000, 128)
    assert not torch.equal(rows[0], rows[1])
    assert rows.untyped_storage().nbytes() < 4_000_000
    assert materialise(experts, torch.Generator().manual_seed(0)).weight.shape == (32, 1024, 1024)


def test_saved_buffers_are_not_left_at_their_initial_values():
    module = nn.Module()
    module.register_buffer("saved", torch.ones(4))
    module.register_buffer("computed", torch.ones(4), persistent=False)
    made = materialise(module, torch.Generator().manual_seed(0))
    assert not torch.equal(made.saved, torch.ones(4))
    assert torch.equal(made.computed, torch.ones(4))


def test_one_tensor_given_twice_stays_one():
    """As in a layer that calls its attention with the same states as query, key and value."""

    class Inner(Attention):
        def forward(self, q, k, v):
            from tests.sites import attend, heads

            return self.o_proj(attend(self, heads(self.q_proj(q)), heads(self.k_proj(k)), heads(self.v_proj(v))))

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def forward(self, x):
            return self.inner(x, x, x)

    assert decide(Outer).rewrite("qkv", "site.inner")


def test_state_is_hashable_and_names_hooks():
    module = nn.Linear(2, 2)
    plain = own_state(module)
    module.register_forward_pre_hook(lambda module, args: None)
    assert hash(plain) != hash(own_state(module))
