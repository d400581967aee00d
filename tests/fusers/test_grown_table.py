"""Tables that grow with the tokens of a call are made long enough once; others are left alone."""

import copy

import torch
from torch import nn
from transformers import CONFIG_MAPPING

from tfbackend.fusers.grown_table import GrownTableFuser
from tfbackend.graph.observe import observe
from tfbackend.meta import build
from tfbackend.plan import make_plan
from tfbackend.serving import ServingSpec

XGLM = {"d_model": 64, "num_layers": 1, "attention_heads": 4, "ffn_dim": 64, "vocab_size": 64,
        "max_position_embeddings": 32}  # fmt: skip


def test_the_table_of_xglm_has_a_row_for_every_token_of_a_call():
    meta = build(CONFIG_MAPPING["xglm"](**XGLM), torch.float32)
    plan = make_plan(meta, ServingSpec(max_model_len=32, max_tokens=100))
    (rewrite,) = [r for r in plan.rewrites if r.fuser == "grown_table"]
    live = copy.deepcopy(meta.base.embed_positions)
    rewrite.layer.grow(live)
    # XGLM's table starts two rows before position 0
    assert live.weights.shape == (102, 64)
    ids = torch.tensor([[3, 0, 31]])
    assert torch.equal(live(ids), meta.base.embed_positions(ids))


class Grows(nn.Module):
    """Keeps a table of the square roots of `rows` places, times `factor`."""

    def __init__(self, scaled):
        super().__init__()
        self.scaled = scaled
        self.make(16)

    def make(self, rows):
        places = torch.arange(rows).float()
        self.register_buffer("table", (places / rows if self.scaled else places)[:, None], persistent=False)

    def forward(self, ids):
        if ids.shape[1] > self.table.shape[0]:
            self.make(ids.shape[1])
        return self.table[ids]


class Base(nn.Module):
    def __init__(self, table):
        super().__init__()
        self.embed, self.table = nn.Embedding(50, 8, device="meta"), table

    def forward(self, input_ids, position_ids=None, use_cache=False):
        return self.embed(input_ids) + self.table(position_ids)


def answer(table):
    from tfbackend.fusers.base import Site
    from tfbackend.graph.kinds import Kind

    base = Base(table).eval()
    seen = observe(base)
    assert not seen.problem, seen.problem
    return GrownTableFuser().match(Site("table", base.table, Kind("table", base.table, seen), seen, ServingSpec()))


def test_a_table_whose_rows_change_as_it_grows_is_left_alone():
    assert answer(Grows(scaled=False)).claims == {""}
    assert "changes as it grows" in answer(Grows(scaled=True)).reason


def test_a_table_that_stays_is_left_alone():
    class Stays(Grows):
        def forward(self, ids):
            return self.table[ids]

    assert not answer(Stays(scaled=False)).near
