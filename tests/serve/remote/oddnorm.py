"""A llama with norms of its own: an RMS norm by another formula whose weight is added to one, one over each head, and
one that clips, which no layer of an engine does.

Copied beside a checkpoint and run from there as remote code, so it imports nothing of the tests.
"""

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaModel,
    apply_rotary_pos_emb,
    eager_attention_forward,
)


class OddnormConfig(LlamaConfig):
    model_type = "oddnorm"


class OffsetNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(size)), eps

    def forward(self, h):
        power = h.float().square().mean(dim=-1, keepdim=True)
        return (h.float() / torch.sqrt(power + self.eps) * (1.0 + self.weight.float())).type_as(h)


class ClippedNorm(OffsetNorm):
    def forward(self, h):
        return super().forward(h).clamp(-1.5, 1.5)


class OddAttention(LlamaAttention):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.over_q, self.over_k = OffsetNorm(self.head_dim, 1e-2), OffsetNorm(self.head_dim, 1e-2)

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **kwargs):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q = self.over_q(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
        k = self.over_k(self.k_proj(hidden_states).view(shape)).transpose(1, 2)
        v = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        cos, sin = position_embeddings
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        out, weights = attend(self, q, k, v, attention_mask, scaling=self.scaling, dropout=0.0)
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), weights


class OddLayer(LlamaDecoderLayer):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.self_attn = OddAttention(config, layer_idx)
        self.input_layernorm = OffsetNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = ClippedNorm(config.hidden_size, config.rms_norm_eps)


class OddnormModel(LlamaModel):
    config_class = OddnormConfig

    def __init__(self, config):
        super().__init__(config)
        self.layers = nn.ModuleList(OddLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = OffsetNorm(config.hidden_size, config.rms_norm_eps)
        self.post_init()


class OddnormForCausalLM(LlamaForCausalLM):
    config_class = OddnormConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = OddnormModel(config)
        self.post_init()
