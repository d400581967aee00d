"""A model that Transformers does not have: attention sinks, a window on every other layer, and no `layer_types`.

Copied beside a checkpoint and run from there as remote code, so it imports nothing of the tests.
"""

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)


class SunkenConfig(LlamaConfig):
    model_type = "sunken"
    sliding_window: int | None = None


class SunkenAttention(nn.Module):
    is_causal = True

    def __init__(self, config, layer_idx):
        super().__init__()
        self.config, self.layer_idx, self.head_dim = config, layer_idx, config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.q_proj = nn.Linear(config.hidden_size, config.num_attention_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, config.hidden_size, bias=False)
        self.sinks = nn.Parameter(torch.zeros(config.num_attention_heads))

    def forward(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query = self.q_proj(hidden_states).view(shape).transpose(1, 2)
        key = self.k_proj(hidden_states).view(shape).transpose(1, 2)
        value = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        cos, sin = position_embeddings
        query, key = apply_rotary_pos_emb(query, key, cos, sin)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        scaling = self.head_dim**-0.5
        output, _ = attend(self, query, key, value, attention_mask, scaling=scaling, s_aux=self.sinks, **kwargs)
        return self.o_proj(output.reshape(*hidden_states.shape[:-1], -1))


class SunkenLayer(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.self_attn = SunkenAttention(config, layer_idx)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states, **kwargs):
        hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class SunkenPreTrainedModel(PreTrainedModel):
    config_class = SunkenConfig
    base_model_prefix = "model"
    _supports_attention_backend = True


class SunkenModel(SunkenPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(SunkenLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config=config)
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, inputs_embeds=None, **kwargs):
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            position_ids = torch.arange(hidden_states.shape[1], device=hidden_states.device)[None]
        about = {"config": self.config, "inputs_embeds": hidden_states, "attention_mask": attention_mask}
        about |= {"past_key_values": None, "position_ids": position_ids}
        masks = (create_causal_mask(**about), create_sliding_window_causal_mask(**about))
        angles = self.rotary_emb(hidden_states, position_ids=position_ids)
        for index, layer in enumerate(self.layers):
            mask = masks[index % 2]
            hidden_states = layer(hidden_states, position_embeddings=angles, attention_mask=mask)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states))


class SunkenForCausalLM(SunkenPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.model = SunkenModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids=None, **kwargs):
        hidden_states = self.model(input_ids, **kwargs).last_hidden_state
        return CausalLMOutputWithPast(logits=self.lm_head(hidden_states))
