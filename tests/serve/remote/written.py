"""Attention written out by hand over four renamed projections, rotated in pairs, and a head called embed_out.

Copied beside a checkpoint and run from there as remote code, so it imports nothing of the tests.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedConfig
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel


class WrittenConfig(PreTrainedConfig):
    model_type = "written"


def turn(x, angles):
    """Rotate neighbours by an angle each."""
    even, odd, cos, sin = x[..., 0::2], x[..., 1::2], angles.cos(), angles.sin()
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


class SelfMix(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.count, self.size = config.num_attention_heads, config.hidden_size // config.num_attention_heads
        self.wq = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.wk = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.wv = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.wo = nn.Linear(config.hidden_size, config.hidden_size, bias=True)

    def heads(self, x):
        return x.view(x.shape[0], x.shape[1], self.count, self.size).transpose(1, 2)

    def forward(self, x, angles):
        q, k, v = turn(self.heads(self.wq(x)), angles), turn(self.heads(self.wk(x)), angles), self.heads(self.wv(x))
        weights = torch.matmul(q, k.transpose(-2, -1)) / self.size**0.5
        length = x.shape[1]
        hidden = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        weights = weights.masked_fill(hidden, torch.finfo(weights.dtype).min)
        mixed = torch.matmul(F.softmax(weights, dim=-1), v)
        return self.wo(mixed.transpose(1, 2).reshape(x.shape))


class Floor(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.att = SelfMix(config)
        self.up = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.down = nn.Linear(3 * config.hidden_size, config.hidden_size)
        self.pre, self.mid = nn.LayerNorm(config.hidden_size), nn.LayerNorm(config.hidden_size)

    def forward(self, x, angles):
        x = x + self.att(self.pre(x), angles)
        return x + self.down(F.gelu(self.up(self.mid(x))))


class WrittenPreTrainedModel(PreTrainedModel):
    config_class = WrittenConfig
    base_model_prefix = "trunk"


class WrittenModel(WrittenPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.embed_in = nn.Embedding(config.vocab_size, config.hidden_size)
        self.floors = nn.ModuleList(Floor(config) for _ in range(config.num_hidden_layers))
        self.last = nn.LayerNorm(config.hidden_size)
        self.half = config.hidden_size // config.num_attention_heads // 2
        self.post_init()

    def get_input_embeddings(self):
        return self.embed_in

    def set_input_embeddings(self, value):
        self.embed_in = value

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, inputs_embeds=None, **kwargs):
        x = self.embed_in(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            position_ids = torch.arange(x.shape[1], device=x.device)[None]
        speeds = 1000.0 ** (-torch.arange(self.half, device=x.device) / self.half)
        angles = (position_ids[..., None].float() * speeds)[:, None]
        for floor in self.floors:
            x = floor(x, angles)
        return BaseModelOutputWithPast(last_hidden_state=self.last(x))


class WrittenForCausalLM(WrittenPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.trunk = WrittenModel(config)
        self.embed_out = nn.Linear(config.hidden_size, config.vocab_size, bias=True)
        self.post_init()

    def get_output_embeddings(self):
        return self.embed_out

    def forward(self, input_ids=None, **kwargs):
        return CausalLMOutputWithPast(logits=self.embed_out(self.trunk(input_ids, **kwargs)[0]))
