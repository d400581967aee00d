"""The tiny models that pool which faults are planted in, made by Transformers and by sentence-transformers' rules."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, PreTrainedTokenizerFast

from tests.verification.planting import Planter
from tfbackend.verification import oracle, pooling_oracle

_SIZES: dict[str, Any] = {
    "vocab_size": 500, "hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_hidden_layers": 2,
    "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_LLAMA: dict[str, Any] = _SIZES | {"num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": False}

CONFIGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    # A pooler, types of tokens, a classifier with a bias.
    "bert": ("bert", "BertForSequenceClassification", _SIZES | {"num_labels": 3, "initializer_range": 0.2}),
    # Labels of each token.
    "tokens": ("distilbert", "DistilBertForTokenClassification", _SIZES | {"num_labels": 3}),
    # Where an answer starts and ends.
    "answers": ("roberta", "RobertaForQuestionAnswering", _SIZES),
    # The last token that is no padding: an outcome reward model.
    "reward": ("llama", "LlamaForSequenceClassification", _LLAMA | {"num_labels": 1}),
    # No folder says what stands for a text.
    "plain": ("modernbert", "ModernBertModel", _SIZES | {"local_attention": 16}),
    "sentence": ("roberta", "RobertaModel", _SIZES),
    "colbert": ("bert", "BertModel", _SIZES),
    "ranks": ("qwen3", "Qwen3ForCausalLM", _LLAMA),
}


def make(name: str, planter: Planter) -> str:
    """The folder of a model's checkpoint, made when it is first asked for."""
    folder = planter.root / "pooling" / name
    if folder.exists():
        return str(folder)
    model_type, architecture, fields = CONFIGS[name]
    config = AutoConfig.for_model(model_type, **fields, architectures=[architecture], dtype="float32")
    if name == "ranks":
        made = planter.call_oracle(oracle.make_checkpoint, config, str(folder))
    else:
        made = planter.call_oracle(pooling_oracle.make_checkpoint, config, str(folder), "For" in architecture)
    assert made.ok, made.error
    {"sentence": _sentence, "colbert": _colbert, "ranks": _ranks}.get(name, lambda folder: None)(folder)
    return str(folder)


def _ranks(folder: Path) -> None:
    """Says in the config which tokens are labels, and has a tokenizer that spells numbers."""
    words = Tokenizer(models.WordLevel({str(number): number for number in range(500)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", unk_token="0").save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["11", "13"],
               "method": "from_2_way_softmax"}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


ST = "sentence_transformers.models."


def _sentence(folder: Path) -> None:
    """Two modes of pooling, a Dense, a LayerNorm, a Dense with what went in added to it, and vectors of length one."""
    torch.manual_seed(5)
    write_modules(folder, {
        f"{ST}Transformer": None,
        f"{ST}Pooling": {"word_embedding_dimension": 128, "pooling_mode_mean_tokens": True,
                       "pooling_mode_max_tokens": True},
        f"{ST}Dense": {"in_features": 256, "out_features": 24, "bias": True,
                       "activation_function": "torch.nn.modules.activation.Tanh"},
        f"{ST}LayerNorm": {"dimension": 24},
        "sentence_transformers.base.modules.dense.Dense": {
            "in_features": 24, "out_features": 20, "bias": False, "use_residual": True,
            "activation_function": "torch.nn.modules.activation.GELU",
        },
        f"{ST}Normalize": {},
    })  # fmt: skip


def _colbert(folder: Path) -> None:
    """As PyLate writes them: a Dense of each token, and vectors of length one without a module that says so."""
    torch.manual_seed(6)
    dense = {"in_features": 128, "out_features": 16, "bias": False,
             "activation_function": "torch.nn.modules.linear.Identity", "use_residual": False}  # fmt: skip
    write_modules(folder, {f"{ST}Transformer": None, "pylate.models.Dense.Dense": dense})
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"model_type": "ColBERT"}))


def write_modules(folder: Path, modules: dict[str, dict[str, Any] | None]) -> None:
    """modules.json, and a folder for each module that has a config, with random weights."""
    listed = []
    for place, (kind, config) in enumerate(modules.items()):
        name = kind.rpartition(".")[2]
        path = f"{place}_{name}" if config is not None else ""
        listed.append({"idx": place, "name": str(place), "path": path, "type": kind})
        if config is None:
            continue
        (folder / path).mkdir()
        (folder / path / "config.json").write_text(json.dumps(config))
        if tensors := _tensors(name, config):
            save_file(tensors, folder / path / "model.safetensors")
    (folder / "modules.json").write_text(json.dumps(listed))


def _tensors(name: str, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    if name == "LayerNorm":
        return {"norm.weight": 1 + torch.randn(config["dimension"]) / 2, "norm.bias": torch.randn(config["dimension"])}
    if name != "Dense":
        return {}
    shape = config["out_features"], config["in_features"]
    made = {"linear.weight": torch.randn(shape) / shape[1] ** 0.5}
    if config["bias"]:
        made["linear.bias"] = torch.randn(shape[0])
    if config.get("use_residual") and shape[0] != shape[1]:
        made["residual.weight"] = torch.randn(shape) / shape[1] ** 0.5
    return made
