"""One KV head for all queries, a bias that grows with distance, one packed projection, a head called output.

Copied beside a checkpoint and run from there as remote code, so it imports nothing of the tests.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedConfig
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel


class SlopedConfig(PreTrainedConfig):
    model_type = "sloped"


class Distance(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.count, self.size = config.num_attention_heads, config.hidden_size // config.num_attention_heads
        self.fused = nn.Linear(config.hidden_size, config.hidden_size + 2 * self.size)
        self.out = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x, bias):
        batch, length, width = x.shape
        q, k, v = self.fused(x).split([width, self.size, self.size], dim=-1)
        q = q.view(batch, length, self.count, self.size).transpose(1, 2)
        k, v = k.unsqueeze(1), v.unsqueeze(1)
        scores = q @ k.transpose(-1, -2) * self.size**-0.5 + bias
        y = scores.softmax(dim=-1) @ v
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Step(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attn1 = Distance(config)
        self.grow = nn.Linear(config.hidden_size, 200)
        self.shrink = nn.Linear(200, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, eps=1e-3)

    def forward(self, x, bias):
        y = self.norm(x)
        return x + self.attn1(y, bias) + self.shrink(F.gelu(self.grow(y), approximate="tanh"))


class SlopedPreTrainedModel(PreTrainedModel):
    config_class = SlopedConfig
    base_model_prefix = "net"


class SlopedModel(SlopedPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.steps = nn.ModuleList(Step(config) for _ in range(config.num_hidden_layers))
        self.count = config.num_attention_heads
        self.post_init()

    def get_input_embeddings(self):
        return self.tokens

    def set_input_embeddings(self, value):
        self.tokens = value

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, inputs_embeds=None, **kwargs):
        x = self.tokens(input_ids) if inputs_embeds is None else inputs_embeds
        places = torch.arange(x.shape[1], device=x.device)
        apart = places[None, :] - places[:, None]
        slopes = 0.5 ** torch.arange(1, self.count + 1, device=x.device)
        bias = apart * slopes[:, None, None]
        bias = bias.masked_fill(apart > 0, float("-inf"))
        for step in self.steps:
            x = step(x, bias)
        return BaseModelOutputWithPast(last_hidden_state=x)


class SlopedForCausalLM(SlopedPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.net = SlopedModel(config)
        self.output = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self):
        return self.output

    def forward(self, input_ids=None, **kwargs):
        return CausalLMOutputWithPast(logits=self.output(self.net(input_ids, **kwargs)[0]))
