"""What the modules of a sentence-transformers folder do to hidden states, in plain torch: one dict of features is
handed from each to the next, as they do it themselves."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers.utils.hub import cached_file

from tfbackend.errors import CheckpointError

TOKENS, SENTENCE = "token_embeddings", "sentence_embedding"
Features = dict[str, torch.Tensor]


class Files:
    """modules.json and what it lists, of a folder or a repository; nothing where there is none.

    Attributes:
        listed: the entries.
        names: classes of the modules, without their packages.
        tokenwise: whether the folder says of itself that it is of a model that gives a vector for each token.
    """

    def __init__(self, model: str) -> None:
        self.model = model
        found = self._json("modules.json") or []
        self.listed: list[Mapping[str, Any]] = found if isinstance(found, list) else found.get("modules", [])
        self.names = [str(module["type"]).rpartition(".")[2] for module in self.listed]
        said = self._json("config_sentence_transformers.json") or {}
        pylate = any(str(module["type"]).startswith("pylate.") for module in self.listed)
        self.tokenwise = pylate or said.get("model_type") == "ColBERT"

    def config(self, module: Mapping[str, Any]) -> Mapping[str, Any]:
        """The config of one module."""
        return self._json(f"{module.get('path', '')}/config.json") or {}

    def weights(self, module: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
        """The tensors of one module, in float32."""
        path = module.get("path", "")
        found = self._file(f"{path}/model.safetensors")
        if found is not None:
            tensors = load_file(found)
        elif (pickled := self._file(f"{path}/pytorch_model.bin")) is not None:
            tensors = torch.load(pickled, map_location="cpu", weights_only=True)
        else:
            raise CheckpointError("A module of sentence-transformers has no weights.", where=f"{self.model}: {path}")
        return {name: tensor.float() for name, tensor in tensors.items()}

    def _json(self, name: str) -> Any:
        found = self._file(name)
        if found is None:
            return None
        with open(found, encoding="utf-8") as file:
            return json.load(file)

    def _file(self, name: str) -> str | None:
        found: str | None = cached_file(
            self.model,
            name,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        return found


def apply_modules(files: Files, hidden: torch.Tensor) -> torch.Tensor:
    """Hidden states [tokens, hidden] of one text -> [1, numbers], or [tokens, numbers] where nothing pools them.

    Raises:
        CheckpointError: a module is not known here.
    """
    features: Features = {TOKENS: hidden}
    for name, module in zip(files.names, files.listed, strict=True):
        if name not in _MODULES:
            raise CheckpointError("A module of sentence-transformers is not known.", where=files.model, found=name)
        _MODULES[name](files, module, features)
    if SENTENCE in features:
        return features[SENTENCE][None]
    unit = files.tokenwise and "Normalize" not in files.names
    return nn.functional.normalize(features[TOKENS], dim=-1) if unit else features[TOKENS]


def _nothing(files: Files, module: Mapping[str, Any], features: Features) -> None:
    """The model itself, or what counts when texts are compared."""


def _pool(files: Files, module: Mapping[str, Any], features: Features) -> None:
    config, x = files.config(module), features[TOKENS]
    named = config.get("pooling_mode", [])
    on = {key.removeprefix("pooling_mode_") for key, value in config.items() if value is True}
    on |= {named} if isinstance(named, str) else set(named)
    features[SENTENCE] = torch.cat([take(x) for names, take in _POOLINGS if on & set(names)])


def _weighted(x: torch.Tensor) -> torch.Tensor:
    weights = torch.arange(1.0, len(x) + 1)[:, None]
    return (x * weights).sum(0) / weights.sum()


_POOLINGS: tuple[tuple[tuple[str, ...], Callable[[torch.Tensor], torch.Tensor]], ...] = (
    (("cls_token", "cls"), lambda x: x[0]),
    (("max_tokens", "max"), lambda x: x.amax(0)),
    (("mean_tokens", "mean"), lambda x: x.sum(0) / len(x)),
    (("mean_sqrt_len_tokens",), lambda x: x.sum(0) / math.sqrt(len(x))),
    (("weightedmean_tokens", "weightedmean"), _weighted),
    (("lasttoken",), lambda x: x[-1]),
)


def _dense(files: Files, module: Mapping[str, Any], features: Features) -> None:
    config, weights = files.config(module), files.weights(module)
    # A Dense that names nothing is of a release that knew of but one place.
    reads = config.get("module_input_name") or (TOKENS if SENTENCE not in features else SENTENCE)
    x = features[reads]
    function = str(config.get("activation_function", "torch.nn.Tanh"))
    if not function.startswith("torch.nn."):
        raise CheckpointError("An activation is not torch's.", where=files.model, found=function)
    package, _, name = function.rpartition(".")
    y = getattr(importlib.import_module(package), name)()(
        nn.functional.linear(x, weights["linear.weight"], weights.get("linear.bias"))
    )
    if config.get("use_residual"):
        y = y + (nn.functional.linear(x, weights["residual.weight"]) if "residual.weight" in weights else x)
    features[config.get("module_output_name") or reads] = y


def _layer_norm(files: Files, module: Mapping[str, Any], features: Features) -> None:
    weights, x = files.weights(module), features[SENTENCE]
    features[SENTENCE] = nn.functional.layer_norm(x, x.shape[-1:], weights["norm.weight"], weights["norm.bias"])


def _normalize(files: Files, module: Mapping[str, Any], features: Features) -> None:
    config = files.config(module)
    reads = config.get("module_input_name") or SENTENCE
    if reads in features:
        features[config.get("module_output_name") or reads] = nn.functional.normalize(features[reads], dim=-1)


_MODULES: dict[str, Callable[[Files, Mapping[str, Any], Features], None]] = {
    "Transformer": _nothing,
    "MultiVectorMask": _nothing,
    "Pooling": _pool,
    "Dense": _dense,
    "LayerNorm": _layer_norm,
    "Normalize": _normalize,
}
