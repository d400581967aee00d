"""A head tied to the embedding by assignment alone, attention through the interface, a norm and a rotation of its own.

Copied beside a checkpoint and run from there as remote code, so it imports nothing of the tests.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedConfig
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel


class HandtiedConfig(PreTrainedConfig):
    model_type = "handtied"


def by_hand(module, query, key, value, attention_mask, scaling, **_):
    scores = query @ key.transpose(2, 3) * scaling
    scores = scores if attention_mask is None else scores + attention_mask
    return (scores.softmax(-1) @ value).transpose(1, 2), None


class Scale(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.gain * (x * torch.rsqrt(torch.mean(x * x, dim=-1, keepdim=True) + 1e-4))


class Attend(nn.Module):
    is_causal = True

    def __init__(self, config, layer_idx):
        super().__init__()
        self.config, self.layer_idx, self.size = config, layer_idx, config.hidden_size // config.num_attention_heads
        self.q_lin = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.k_lin = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.v_lin = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.out_lin = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.q_gain, self.k_gain = Scale(self.size), Scale(self.size)

    def forward(self, x, mask):
        shape = (*x.shape[:-1], -1, self.size)
        q = self.q_gain(self.q_lin(x).view(shape)).transpose(1, 2)
        k = self.k_gain(self.k_lin(x).view(shape)).transpose(1, 2)
        v = self.v_lin(x).view(shape).transpose(1, 2)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, by_hand)
        y, _ = attend(self, q, k, v, mask, scaling=0.3)
        return self.out_lin(y.reshape(x.shape))


class Layer(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.attend = Attend(config, layer_idx)
        self.w1 = nn.Linear(config.hidden_size, 144, bias=False)
        self.w3 = nn.Linear(config.hidden_size, 144, bias=False)
        self.w2 = nn.Linear(144, config.hidden_size, bias=False)
        self.before, self.between = Scale(config.hidden_size), Scale(config.hidden_size)

    def forward(self, x, mask):
        x = x + self.attend(self.before(x), mask)
        y = self.between(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class HandtiedPreTrainedModel(PreTrainedModel):
    config_class = HandtiedConfig
    base_model_prefix = "core"
    _supports_attention_backend = True


class HandtiedModel(HandtiedPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.emb = nn.Embedding(config.vocab_size, config.hidden_size)
        self.pos = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.num_hidden_layers))
        self.final = Scale(config.hidden_size)
        self.post_init()

    def get_input_embeddings(self):
        return self.emb

    def set_input_embeddings(self, value):
        self.emb = value

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, inputs_embeds=None, **kwargs):
        x = self.emb(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            position_ids = torch.arange(x.shape[1], device=x.device)[None]
        about = {"config": self.config, "inputs_embeds": x, "attention_mask": attention_mask}
        mask = create_causal_mask(**about, past_key_values=None, position_ids=position_ids)
        x = x + self.pos(position_ids)
        for layer in self.layers:
            x = layer(x, mask)
        return BaseModelOutputWithPast(last_hidden_state=self.final(x))


class HandtiedForCausalLM(HandtiedPreTrainedModel):
    _tied_weights_keys: ClassVar = {"lm_head.weight": "core.emb.weight"}

    def __init__(self, config):
        super().__init__(config)
        self.core = HandtiedModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.lm_head.weight = self.core.emb.weight
        self.post_init()

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids=None, **kwargs):
        return CausalLMOutputWithPast(logits=self.lm_head(self.core(input_ids, **kwargs)[0]) / 3)
