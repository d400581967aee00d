"""Learned positions counted from two, torch's own attention, groups repeated by hand, a head called classifier.

Copied beside a checkpoint and run from there as remote code, so it imports nothing of the tests.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedConfig
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel


class ShiftedConfig(PreTrainedConfig):
    model_type = "shifted"


class Grouped(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.count, self.groups = config.num_attention_heads, 2
        self.size = config.hidden_size // self.count
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, self.groups * self.size)
        self.value = nn.Linear(config.hidden_size, self.groups * self.size)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x):
        batch, length, _ = x.shape
        q = self.query(x).view(batch, length, self.count, self.size).transpose(1, 2)
        k = self.key(x).view(batch, length, self.groups, self.size).transpose(1, 2)
        v = self.value(x).view(batch, length, self.groups, self.size).transpose(1, 2)
        k, v = (t.repeat_interleave(self.count // self.groups, dim=1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.2)
        return self.dense(y.transpose(1, 2).reshape(batch, length, -1))


class Stage(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attention = Grouped(config)
        self.wide = nn.Linear(config.hidden_size, 160, bias=False)
        self.narrow = nn.Linear(160, config.hidden_size, bias=False)
        self.first = nn.RMSNorm(config.hidden_size, eps=1e-3)
        self.second = nn.RMSNorm(config.hidden_size, eps=1e-3)

    def forward(self, x):
        x = x + self.first(self.attention(x))
        return x + self.second(self.narrow(F.relu(self.wide(x)).square()))


class ShiftedPreTrainedModel(PreTrainedModel):
    config_class = ShiftedConfig
    base_model_prefix = "body"


class ShiftedModel(ShiftedPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.words = nn.Embedding(config.vocab_size, config.hidden_size)
        self.places = nn.Embedding(config.max_position_embeddings + 2, config.hidden_size)
        self.stages = nn.ModuleList(Stage(config) for _ in range(config.num_hidden_layers))
        self.post_init()

    def get_input_embeddings(self):
        return self.words

    def set_input_embeddings(self, value):
        self.words = value

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, inputs_embeds=None, **kwargs):
        x = self.words(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            position_ids = torch.arange(x.shape[1], device=x.device)[None]
        x = x + self.places(position_ids + 2)
        for stage in self.stages:
            x = stage(x)
        return BaseModelOutputWithPast(last_hidden_state=x)


class ShiftedForCausalLM(ShiftedPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.body = ShiftedModel(config)
        self.classifier = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self):
        return self.classifier

    def forward(self, input_ids=None, **kwargs):
        hidden = self.body(input_ids, **kwargs)[0]
        return CausalLMOutputWithPast(logits=20.0 * torch.tanh(self.classifier(hidden) / 20.0))
