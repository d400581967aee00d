"""A model that takes no positions: rows of a table from the front, and a rotation that each layer numbers for itself.

Copied beside a checkpoint and run from there as remote code, so it imports nothing of the tests.
"""

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel


class CountingConfig(PreTrainedConfig):
    model_type = "counting"


def eager(module, query, key, value, attention_mask=None, scaling=1.0, **_):
    count = query.shape[-2]
    scores = query @ key.transpose(-1, -2) * scaling
    scores = scores.masked_fill(torch.ones(count, count, dtype=torch.bool).triu(1), float("-inf"))
    return (scores.softmax(-1) @ value).transpose(1, 2), None


class Turned(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.count = config, config.num_attention_heads
        self.size = config.hidden_size // self.count
        self.query, self.key, self.value = (nn.Linear(config.hidden_size, config.hidden_size) for _ in range(3))
        self.out = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def turn(self, x):
        rates = 300.0 ** (-torch.arange(self.size // 2, device=x.device) / (self.size // 2))
        angles = torch.arange(x.shape[-2], device=x.device)[:, None] * rates
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), dim=-1)

    def forward(self, x):
        shape = (1, -1, self.count, self.size)
        q = self.query(x).view(shape).transpose(1, 2)
        k = self.key(x).view(shape).transpose(1, 2)
        v = self.value(x).view(shape).transpose(1, 2)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        y, _ = attend(self, self.turn(q), self.turn(k), v, None, scaling=0.3, is_causal=True)
        return self.out(y.reshape(1, x.shape[1], -1))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attention = Turned(config)
        self.norm, self.last = nn.LayerNorm(config.hidden_size), nn.LayerNorm(config.hidden_size)
        self.up, self.down = nn.Linear(config.hidden_size, 160), nn.Linear(160, config.hidden_size)

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.down(nn.functional.gelu(self.up(self.last(x))))


class CountingPreTrainedModel(PreTrainedModel):
    config_class = CountingConfig
    base_model_prefix = "body"
    _supports_attention_backend = True


class CountingModel(CountingPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.words = nn.Embedding(config.vocab_size, config.hidden_size)
        self.places = nn.Parameter(torch.zeros(1, config.max_position_embeddings, config.hidden_size))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.post_init()

    def get_input_embeddings(self):
        return self.words

    def set_input_embeddings(self, value):
        self.words = value

    def forward(self, input_ids=None, inputs_embeds=None, use_cache=None):
        x = self.words(input_ids) if inputs_embeds is None else inputs_embeds
        x = x + self.places[:, : x.shape[1], :]
        for block in self.blocks:
            x = block(x)
        return BaseModelOutputWithPast(last_hidden_state=x)


class CountingForCausalLM(CountingPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.body = CountingModel(config)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids=None, use_cache=None):
        return CausalLMOutputWithPast(logits=self.head(self.body(input_ids)[0]))
