"""What sentence-transformers' files say follows a model: which hidden states are taken together, and what is done with
them.

    Transformer, Pooling, Dense, LayerNorm, Normalize     a vector of a text
    Transformer, Dense                                    a vector of each token, as ColBERT compares them
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tfbackend.errors import CheckpointError, UnsupportedModelError

MODES = {
    "cls": "the first token",
    "max": "the largest of each number over all tokens",
    "mean": "the mean of all tokens",
    "mean_sqrt_len_tokens": "the sum of all tokens over the root of their number",
    "weightedmean": "the mean of all tokens, each counted as often as its place says",
    "lasttoken": "the last token",
}
"""Modes of the Pooling module, in the order in which it puts their vectors side by side."""

_SPELLED = {"cls_token": "cls", "max_tokens": "max", "mean_tokens": "mean", "weightedmean_tokens": "weightedmean"}
_AFTER = ("Dense", "LayerNorm", "Normalize")
_MASK = "MultiVectorMask"
"""Says which tokens count when two texts are compared, which is done by who compares them."""
_TOKENS, _SENTENCE = "token_embeddings", "sentence_embedding"
_ACTIVATIONS = "torch.nn."

Read = Callable[[str], Any]
"""Path of a file of JSON in the folder -> what it holds, None where there is no such file."""


@dataclass(frozen=True)
class Step:
    """One module behind the pooling: its class without its package, its path in the folder, its config."""

    name: str
    path: str
    config: Mapping[str, Any]

    def __str__(self) -> str:
        sizes = f" {self.config['in_features']} -> {self.config['out_features']}" if self.name == "Dense" else ""
        return f"{self.name}{sizes}"


@dataclass(frozen=True)
class SentencePlan:
    """What becomes of the hidden states of a text.

    Attributes:
        modes: what is taken of them, of MODES, side by side; () where each token has a vector of its own.
        steps: what is done with that, a last Normalize left out.
        normalised: whether the vectors have length one at the end.
        skipped: words whose tokens do not count when texts are compared; they have vectors all the same.
    """

    modes: tuple[str, ...]
    steps: tuple[Step, ...]
    normalised: bool
    skipped: tuple[str, ...] = ()

    @property
    def which(self) -> str:
        """What is taken, in words."""
        return " beside ".join(MODES[mode] for mode in self.modes) or "each token"


def sentence_plan(read: Read) -> SentencePlan | None:
    """What the files of a folder say; None where it is not one of sentence-transformers.

    Raises:
        UnsupportedModelError: they list something that cannot be done.
    """
    listed = read("modules.json")
    modules = listed.get("modules", []) if isinstance(listed, Mapping) else listed
    if not modules:
        return None
    names = module_names(modules)
    paths = [str(module.get("path", "")) for module in modules]
    configs: list[Mapping[str, Any]] = [read(f"{path}/config.json" if path else "config.json") or {} for path in paths]
    steps = [Step(*each) for each in zip(names, paths, configs, strict=True) if each[0] in _AFTER]
    said = read("config_sentence_transformers.json") or {}
    if "Pooling" in names:
        modes = pooling_modes(configs[names.index("Pooling")])
        skipped: Sequence[str] = ()
        colbert = False
    else:
        mask = configs[names.index(_MASK)] if _MASK in names else {}
        modes, skipped = (), mask.get("skiplist_words") or said.get("skiplist_words") or ()
        colbert = said.get("model_type") == "ColBERT" or any("pylate." in str(m.get("type")) for m in modules)
    for step in steps:
        _check(step, _SENTENCE if modes else _TOKENS)
    last = bool(steps) and steps[-1].name == "Normalize"
    unit = last or (colbert and all(step.name != "Normalize" for step in steps))
    return SentencePlan(modes, tuple(steps[:-1] if last else steps), unit, tuple(skipped))


def _check(step: Step, place: str) -> None:
    """See that a module reads and writes what the modules before and after it do."""
    named = step.config.get("module_input_name")
    # A Dense that names nothing is of a release that knew of but one place; the others have a place of their own.
    reads = named or (place if step.name == "Dense" else _SENTENCE)
    writes = step.config.get("module_output_name") or reads
    if (reads, writes) != (place, place):
        raise UnsupportedModelError(
            "A module of sentence-transformers reads or writes something else than the modules around it.",
            where=f"{step.path}/config.json",
            found=f"{step.name} from {reads} to {writes}",
            needed=place,
        )
    function = str(step.config.get("activation_function", _ACTIVATIONS))
    if not function.startswith(_ACTIVATIONS):
        raise UnsupportedModelError(
            "A Dense of sentence-transformers has an activation that is not torch's.",
            where=f"{step.path}/config.json",
            found=function,
        )


def module_names(modules: Sequence[Mapping[str, Any]]) -> list[str]:
    """The classes of the modules that modules.json lists, without their packages.

    Raises:
        UnsupportedModelError: they are not a Transformer, a Pooling or none, and then any of Dense, LayerNorm and
            Normalize; without a Pooling something has to follow.
    """
    names = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    pooled = names[1:2] == ["Pooling"]
    rest, known = names[1 + pooled :], (*_AFTER, *(() if pooled else (_MASK,)))
    if names[:1] != ["Transformer"] or any(name not in known for name in rest) or not (pooled or rest):
        raise UnsupportedModelError(
            "What sentence-transformers does after the model cannot be done here.",
            where="modules.json",
            found=", ".join(names),
            needed="Transformer, Pooling or none, and then any of Dense, LayerNorm and Normalize",
        )
    return names


def pooling_modes(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The modes that the config of a Pooling module turns on, of MODES and in their order.

    Raises:
        UnsupportedModelError: it turns on none, or one that is not known, or leaves out the tokens of a prompt.
    """
    named = config.get("pooling_mode")
    given = [named] if isinstance(named, str) else [*(named or ())]
    given += [
        k.removeprefix("pooling_mode_") for k, on in config.items() if k.startswith("pooling_mode_") and on is True
    ]
    modes = {_SPELLED.get(mode, mode) for mode in given}
    problem = f"modes {', '.join(sorted(modes)) or 'none'}" if not modes or modes - MODES.keys() else ""
    if config.get("include_prompt", True) is False:
        problem = "include_prompt is false: the tokens of a prompt would have to be left out"
    if problem:
        raise UnsupportedModelError(
            "A Pooling of sentence-transformers cannot be done here.",
            where="config.json of Pooling",
            found=problem,
            needed=", ".join(MODES),
        )
    return tuple(mode for mode in MODES if mode in modes)


def pool(mode: str, hidden: torch.Tensor) -> torch.Tensor:
    """Hidden states [tokens, hidden] of one text -> [hidden] in float32."""
    hidden = hidden.float()
    if mode == "cls":
        return hidden[0]
    if mode == "lasttoken":
        return hidden[-1]
    if mode == "max":
        return hidden.max(0).values
    if mode == "weightedmean":
        places = torch.arange(1, len(hidden) + 1, device=hidden.device, dtype=hidden.dtype)
        summed: torch.Tensor = places @ hidden
        return summed / places.sum()
    assert mode in ("mean", "mean_sqrt_len_tokens"), mode
    return hidden.mean(0) if mode == "mean" else hidden.sum(0) / math.sqrt(len(hidden))


class Dense(nn.Module):
    """A linear with an activation, and with what went in added to it where the config says so."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width, out = int(config["in_features"]), int(config["out_features"])
        self.linear = nn.Linear(width, out, bias=bool(config.get("bias", True)))
        self.adds = bool(config.get("use_residual"))
        if self.adds and width != out:
            self.residual = nn.Linear(width, out, bias=False)
        package, _, name = str(config.get("activation_function", "torch.nn.Tanh")).rpartition(".")
        self.activation: nn.Module = getattr(importlib.import_module(package), name)()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        y: torch.Tensor = self.activation(self.linear(x))
        if not self.adds:
            return y
        return y + (self.residual(x) if hasattr(self, "residual") else x)


class LayerNorm(nn.Module):
    """A layer norm of torch's, at the name that its file has for it."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(int(config["dimension"]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., n] -> [..., n]."""
        normed: torch.Tensor = self.norm(x)
        return normed


class Normalize(nn.Module):
    """Makes vectors as long as one."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., n] -> [..., n]."""
        return nn.functional.normalize(x, dim=-1)


_STEPS: dict[str, Callable[[Mapping[str, Any]], nn.Module]] = {
    "Dense": Dense,
    "LayerNorm": LayerNorm,
    "Normalize": Normalize,
}


def build_steps(
    steps: Sequence[Step], weights_of: Callable[[str], Mapping[str, torch.Tensor] | None]
) -> nn.Sequential | None:
    """The modules behind the pooling with their weights in float32, None for none.

    Args:
        weights_of: path of a module -> its tensors, None where it has no file of weights.

    Raises:
        CheckpointError: a module's file of weights is not there, or does not fit it.
    """
    made = nn.Sequential()
    for step in steps:
        module = _STEPS[step.name](step.config)
        tensors = weights_of(step.path) if module.state_dict() else {}
        try:
            if tensors is None:
                raise RuntimeError("there is no file of weights")
            module.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
        except RuntimeError as error:
            raise CheckpointError(
                "The weights of a module of sentence-transformers do not fit it.",
                where=step.path,
                found=" ".join(str(error).split()),
            ) from error
        made.append(module.requires_grad_(False))
    return made if len(made) else None
