"""A llama under other names: one projection for query, key and value, one for gate and up, layers called blocks.

Copied beside a checkpoint and run from there as remote code, so it imports nothing of the tests.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.models.llama.modeling_llama import (
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    eager_attention_forward,
)


class PackedConfig(LlamaConfig):
    model_type = "packed"


class Mixer(nn.Module):
    is_causal = True

    def __init__(self, config, layer_idx):
        super().__init__()
        self.config, self.layer_idx, self.size = config, layer_idx, config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.widths = [config.num_attention_heads * self.size, *[config.num_key_value_heads * self.size] * 2]
        self.W_pack = nn.Linear(config.hidden_size, sum(self.widths), bias=True)
        self.W_out = nn.Linear(self.widths[0], config.hidden_size, bias=False)

    def forward(self, x, angles, mask=None, **kwargs):
        parts = self.W_pack(x).split(self.widths, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in parts)
        q, k = apply_rotary_pos_emb(q, k, *angles)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        y, _ = attend(self, q, k, v, mask, scaling=self.size**-0.5, dropout=0.0)
        return self.W_out(y.flatten(2))


class Gate(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.w13 = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.w2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        a, b = self.w13(x).chunk(2, dim=-1)
        return self.w2(F.silu(a) * b)


class Block(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.mix, self.ffn = Mixer(config, layer_idx), Gate(config)
        self.n1 = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.n2 = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, x, angles, mask):
        x = x + self.mix(self.n1(x), angles, mask)
        return x + self.ffn(self.n2(x))


class PackedPreTrainedModel(PreTrainedModel):
    config_class = PackedConfig
    base_model_prefix = "transformer"
    _supports_attention_backend = True


class PackedModel(PackedPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.wte = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config, index) for index in range(config.num_hidden_layers))
        self.ln_f = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rope = LlamaRotaryEmbedding(config=config)
        self.post_init()

    def get_input_embeddings(self):
        return self.wte

    def set_input_embeddings(self, value):
        self.wte = value

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, inputs_embeds=None, **kwargs):
        x = self.wte(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            position_ids = torch.arange(x.shape[1], device=x.device)[None]
        about = {"config": self.config, "inputs_embeds": x, "attention_mask": attention_mask}
        mask = create_causal_mask(**about, past_key_values=None, position_ids=position_ids)
        angles = self.rope(x, position_ids=position_ids)
        for block in self.blocks:
            x = block(x, angles, mask)
        return BaseModelOutputWithPast(last_hidden_state=self.ln_f(x))


class PackedForCausalLM(PackedPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.transformer = PackedModel(config)
        self.output = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self):
        return self.output

    def forward(self, input_ids=None, **kwargs):
        hidden = self.transformer(input_ids, **kwargs).last_hidden_state
        return CausalLMOutputWithPast(logits=self.output(hidden) * 0.7)
