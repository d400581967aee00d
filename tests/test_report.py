"""The report that a server writes and `inspect` shows."""

import torch
from transformers import LlamaConfig

from tfbackend.fusers.base import Miss, Rewrite
from tfbackend.meta import build
from tfbackend.plan import Plan, make_plan
from tfbackend.proof import Prover
from tfbackend.report import report, write_report
from tfbackend.serving import ServingSpec


def plan_of(rewrites=(), misses=(), **more):
    return Plan("Tiny", tuple(rewrites), tuple(misses), None, "", "embed", None, False, **more)


def lines(plan):
    return [" ".join(line.split()) for line in report(plan).splitlines()]


def test_sites_that_differ_by_number_share_a_line():
    rewrites = [Rewrite(f"layers.{i}.mlp", "glu", "merged" if i != 3 else "other") for i in (0, 1, 2, 3, 5)]
    found = lines(plan_of(rewrites))
    assert "layers.{0-2,5}.mlp merged" in found
    assert "layers.3.mlp other" in found


def test_names_without_a_number_stand_alone():
    assert "norm rms" in lines(plan_of([Rewrite("norm", "norm", "rms")]))


def test_misses_say_who_why_and_where():
    found = lines(plan_of(misses=[Miss("glu", f"layers.{i}.mlp", "no kernel", "modeling_x.py:7") for i in range(2)]))
    assert "layers.{0-1}.mlp glu: no kernel (modeling_x.py:7)" in found
    assert "Not rewritten" in found
    assert any(line.startswith("Not rewritten: nothing") for line in lines(plan_of()))


def test_unproven_rewrites_are_listed_apart():
    found = lines(plan_of(unproven=("layers.0.mlp: the proof budget of 1 s was spent",), proofs=(5, 2)))
    assert "Proven: 5 kinds of site, 2 of them remembered" in found
    assert "unproven: layers.0.mlp: the proof budget of 1 s was spent" in found


def test_file_is_named_by_its_content(tmp_path):
    one, other = plan_of([Rewrite("a", "x", "one")]), plan_of([Rewrite("a", "x", "other")])
    first = write_report(tmp_path, one)
    assert write_report(tmp_path, one) == first
    assert write_report(tmp_path, other) != first
    assert first.read_text() == report(one)
    assert len(list(tmp_path.iterdir())) == 2, "no temporary file is left"


def test_whole_report_of_a_model():
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=64, tie_word_embeddings=True)
    found = lines(make_plan(build(config, torch.float32), ServingSpec(), Prover()))
    assert found[0].endswith(": LlamaForCausalLM")
    assert "embed_tokens Embedding: vocabulary embedding 64x64" in found
    assert "layers.{0-2}.self_attn attention 4/2 heads of 16, scale 0.25" in found
    assert "lm_head tied head: plain" in found
