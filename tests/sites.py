"""Plans of tiny modules: what a fuser answers for one site, and the source text that its edits make."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn

from tfbackend.fusers.base import Miss, Rewrite, Site
from tfbackend.graph.interface import attention_interface
from tfbackend.graph.observe import TOKENS, Observation, observe
from tfbackend.graph.statepass import Keeping, keep
from tfbackend.planner import Planner, collect_proven
from tfbackend.proof import Prover
from tfbackend.serving import MLA_OFF, MLASizes, ServingSpec
from tfbackend.source.edits import apply_edits

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

WIDTH, HEADS, KV_HEADS, DIM = 32, 4, 2, 8


class OneSite(nn.Module):
    """A base model of an embedding and the given modules, one after the other."""

    def __init__(self, sites: list[nn.Module], *, tp_plan: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.site = sites[0]
        self.others = nn.ModuleList(sites[1:])
        self.config = SimpleNamespace()
        self._tp_plan = dict(tp_plan or {})

    def forward(self, input_ids: torch.Tensor, position_ids: Any = None, use_cache: bool = False) -> Any:
        x = self.embed(input_ids)
        results = [self.site(x), *(other(x) for other in self.others)]
        return results[0]


class Decision:
    """The plan of a base model: the proven rewrites, the misses and the sites they speak of."""

    def __init__(self, base: nn.Module, serving: ServingSpec, prover: Prover, keeping: Keeping | None = None) -> None:
        self.observation: Observation = replace(observe(base), keeping=keeping)
        assert not self.observation.problem, self.observation.problem
        meta = SimpleNamespace(base=base, base_path="", embedding_path="embed")
        self.planner = Planner(meta, serving, self.observation)  # type: ignore[arg-type]
        self.rewrites, self.misses, self.unproven = collect_proven(self.planner, prover)

    def rewrite(self, fuser: str, site: str = "site") -> Rewrite:
        found = [r for r in self.rewrites if (r.fuser, r.qualname) == (fuser, site)]
        assert found, f"no {fuser} at {site}; misses: {[str(m) for m in self.misses]}"
        return found[0]

    def reason(self, fuser: str, site: str = "site") -> str:
        """Why `fuser` did nothing; fails where it did something."""
        done = [str(r.summary) for r in self.rewrites if (r.fuser, r.qualname) == (fuser, site)]
        assert not done, f"{fuser} rewrote {site}: {done}"
        reasons = [m.reason for m in self.misses if (m.fuser, m.qualname) == (fuser, site)]
        return reasons[0] if reasons else "silent"

    def text(self, site: str = "site") -> str:
        """The edited forward."""
        source = self.planner.sites[site].source
        assert not isinstance(source, str), source
        edits = [e for r in self.rewrites if r.qualname == site for e in r.edits]
        return apply_edits(source.text, edits)

    def answer(self, fuser: Any, site: str = "site") -> Rewrite | Miss:
        """What one fuser says of a site by itself, before any proof."""
        view: Site = self.planner.sites[site]
        match = fuser.match(view)
        return match if isinstance(match, Miss) else fuser.rewrite(view, match)


def decide(
    *build: Callable[[], nn.Module],
    tp_size: int = 1,
    quantization: str | None = None,
    tp_plan: Mapping[str, str] | None = None,
    sequence_parallel_moe: bool = False,
    directory: Path | None = None,
    budget: float = 60.0,
    mla: MLASizes | str = MLA_OFF,
    stateless: str = "",
    serving: ServingSpec | None = None,
) -> Decision:
    """Plan a model of the modules that `build` makes, for `serving` or for what the other arguments say."""
    with init_empty_weights(include_buffers=False):
        base = OneSite([make() for make in build], tp_plan=tp_plan)
    base.eval()
    serving = serving or ServingSpec(
        tp_size=tp_size,
        quantization=quantization,
        sequence_parallel_moe=sequence_parallel_moe,
        mla=mla,
        stateless=stateless,
    )
    return Decision(base, serving, Prover(directory, budget))


def decide_keeping(build: Callable[[], nn.Module]) -> Decision:
    """Plan a base model, with what it keeps outside Transformers' cache."""
    with init_empty_weights(include_buffers=False):
        base = build().eval()
    return Decision(base, ServingSpec(), Prover(None, 60.0), keep(base))


def attend(module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **keywords: Any) -> torch.Tensor:
    """What a forward of Transformers does with its q, k, v of [1, heads, tokens, dim]: -> [1, tokens, heads * dim]."""
    keywords.setdefault("scaling", DIM**-0.5)
    keywords.setdefault("is_causal", True)
    output, _ = attention_interface(module, q, k, v, None, **keywords)
    return output.reshape(1, output.shape[1], -1)


def heads(x: torch.Tensor) -> torch.Tensor:
    """[1, tokens, heads * dim] -> [1, heads, tokens, dim]."""
    return x.view(1, x.shape[1], -1, DIM).transpose(1, 2)


def lines(text: str) -> list[str]:
    """The statements of a forward without its `def` line and indentation."""
    return [line.strip() for line in text.strip().splitlines()[1:] if line.strip()]


__all__ = [
    "DIM",
    "HEADS",
    "KV_HEADS",
    "TOKENS",
    "WIDTH",
    "Decision",
    "OneSite",
    "attend",
    "decide",
    "decide_keeping",
    "heads",
    "lines",
]
