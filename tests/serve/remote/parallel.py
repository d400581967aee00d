"""Attention and feed-forward side by side on one norm, learned positions, and linears that keep their weight [in, out].

Copied beside a checkpoint and run from there as remote code, so it imports nothing of the tests.
"""

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.models.llama.modeling_llama import eager_attention_forward


class ParallelConfig(PretrainedConfig):
    model_type = "parallel"

    def __init__(self, vocab_size=500, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, **kwargs):
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.num_hidden_layers, self.num_attention_heads = num_hidden_layers, num_attention_heads
        self.max_position_embeddings = kwargs.pop("max_position_embeddings", 512)
        super().__init__(**kwargs)


class Turned(nn.Module):
    """y = x @ weight + bias."""

    def __init__(self, wide, out):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(wide, out)), nn.Parameter(torch.zeros(out))

    def forward(self, x):
        return torch.matmul(x, self.weight) + self.bias


class Squared(nn.Module):
    def forward(self, x):
        return torch.relu(x) ** 2


class Block(nn.Module):
    is_causal = True

    def __init__(self, config, layer_idx):
        super().__init__()
        self.config, self.layer_idx, width = config, layer_idx, config.hidden_size
        self.heads, self.num_key_value_groups = config.num_attention_heads, 1
        self.norm = nn.LayerNorm(width, eps=1e-3)
        self.qkv, self.proj = Turned(width, 3 * width), Turned(width, width)
        self.fc_in, self.fc_out, self.act = Turned(width, 3 * width), Turned(3 * width, width), Squared()

    def forward(self, x, mask=None):
        y = self.norm(x)
        q, k, v = self.qkv(y).chunk(3, dim=-1)
        q, k, v = (part.view(*part.shape[:-1], -1, 32).transpose(1, 2) for part in (q, k, v))
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        a, _ = attend(self, q, k, v, mask, scaling=0.2, dropout=0.0)
        return x + self.proj(a.reshape(*x.shape[:-1], -1)) + self.fc_out(self.act(self.fc_in(y)))


class ParallelPreTrainedModel(PreTrainedModel):
    config_class = ParallelConfig
    base_model_prefix = "backbone"
    _supports_attention_backend = True


class ParallelModel(ParallelPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.h = nn.ModuleList(Block(config, index) for index in range(config.num_hidden_layers))
        self.final = nn.LayerNorm(config.hidden_size, eps=1e-3, bias=False)
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, inputs_embeds=None, **kwargs):
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            position_ids = torch.arange(x.shape[1], device=x.device)[None]
        x = x + self.embed_positions(position_ids)
        about = {"config": self.config, "inputs_embeds": x, "attention_mask": attention_mask}
        mask = create_causal_mask(**about, past_key_values=None, position_ids=position_ids)
        for block in self.h:
            x = block(x, mask)
        return BaseModelOutputWithPast(last_hidden_state=self.final(x))


class ParallelForCausalLM(ParallelPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.backbone = ParallelModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=True)
        self.post_init()

    def forward(self, input_ids=None, **kwargs):
        return CausalLMOutputWithPast(logits=self.lm_head(self.backbone(input_ids, **kwargs).last_hidden_state))
