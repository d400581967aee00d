"""Transformers with its experts in another order: what an engine that permutes them would say.

No mixture of experts is served yet, so the fault cannot be planted in an engine. Runs where vLLM is not imported.
"""

import torch

from tfbackend.verification import oracle
from tfbackend.verification.answers import Answer, Prompt

STACKED = ("experts.gate_up_proj", "experts.down_proj")


def answers(model: str, prompts: tuple[Prompt, ...], max_tokens: int, permuted: bool) -> list[Answer]:
    """Greedy continuations; `permuted` gives each expert the weights of its neighbour, and leaves the router alone."""
    loaded = oracle.load(model)
    stacked = [parameter for name, parameter in loaded.named_parameters() if name.endswith(STACKED)]
    assert stacked, "the experts are not where they were"
    if permuted:
        with torch.no_grad():
            for parameter in stacked:
                parameter.copy_(parameter.roll(1, dims=0))
    return [oracle.answer(loaded, prompt, max_tokens) for prompt in prompts]
