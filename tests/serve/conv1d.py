"""Checkpoints of gpt2, whose linears keep their weights [in, out], and what its tests do in other processes."""

import json
from pathlib import Path
from typing import Any

from tests.serve.configs import Variant
from tests.serve.oracle import load
from tests.serve.tiny import make_checkpoint

GPT2 = Variant(
    "gpt2-conv1d",
    "gpt2",
    {
        "vocab_size": 500,
        "n_embd": 128,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 512,
        "n_inner": 192,
        "activation_function": "gelu_new",
        "scale_attn_by_inverse_layer_idx": True,
        "layer_norm_epsilon": 1e-2,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
)
# As wide inside as outside: nothing but the values tells which way round a weight lies.
SQUARE = Variant("gpt2-conv1d-square", "gpt2", GPT2.fields | {"n_inner": 128})

GROUP = 32
QUANTIZATION = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}


def make_gptq(folder: str) -> None:
    """Write gpt2 with GPTQ's packed four-bit weights, and beside it, in `<folder>-whole`, what they stand for."""
    import torch
    from safetensors.torch import load_file, save_file

    path, beside = make_checkpoint(SQUARE, Path(folder)), make_checkpoint(SQUARE, Path(f"{folder}-whole"))
    whole, packed = load_file(path / "model.safetensors"), {}
    for name, tensor in list(whole.items()):
        if ".h." in name and name.endswith("weight") and tensor.dim() == 2:
            parts, whole[name] = _quantize(tensor)
            packed |= {f"{name.removesuffix('weight')}{leaf}": part for leaf, part in parts.items()}
        else:
            packed[name] = whole[name] = tensor.to(torch.bfloat16).float()
    save_file(whole, beside / "model.safetensors", {"format": "pt"})
    save_file(packed, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text()) | {"quantization_config": QUANTIZATION}
    (path / "config.json").write_text(json.dumps(config))


def logprobs_of(
    folder: str, prompts: list[list[int]], tokens: list[list[int]], turn: bool = False
) -> list[list[float]]:
    """Transformers' log-probabilities of tokens after prompts; `turn` transposes the square weights first."""
    import torch

    model = load(Path(folder))
    if turn:
        for name, parameter in model.named_parameters():
            if ".h." in name and parameter.dim() == 2 and parameter.shape[0] == parameter.shape[1]:
                parameter.data = parameter.data.t().contiguous()
    found = []
    for prompt, following in zip(prompts, tokens, strict=True):
        ids = torch.tensor([[*prompt, *following]])
        with torch.inference_mode():
            said = model(input_ids=ids, use_cache=False).logits[0].double().log_softmax(-1)
        found.append(said[len(prompt) - 1 : -1].gather(-1, ids[0, len(prompt) :, None])[:, 0].tolist())
    return found


def _quantize(weight: Any) -> tuple[dict[str, Any], Any]:
    """(the tensors that GPTQ keeps, what they stand for) of a weight [in, out]. Quantizers pack [in / 8, out]."""
    import torch

    rows, columns = weight.shape
    groups = torch.arange(rows) // GROUP
    largest = weight.abs().view(rows // GROUP, GROUP, columns).amax(1)
    scales = (largest / 7).to(torch.bfloat16).float()
    numbers = (weight / scales[groups]).round().clamp(-8, 7).to(torch.int64)
    eights = (numbers + 8).view(rows // 8, 8, columns)
    words = sum(eights[:, i] << (4 * i) for i in range(8))
    zeros = sum(torch.full((rows // GROUP, columns // 8), 7, dtype=torch.int64) << (4 * i) for i in range(8))
    parts = {"qweight": _int32(words), "qzeros": _int32(zeros), "scales": scales, "g_idx": groups.to(torch.int32)}
    return parts, numbers * scales[groups]


def _int32(words: Any) -> Any:
    import torch

    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def linears_of(model: Any) -> list[tuple[str, str, tuple[int, int]]]:
    """(path in the first layer, class, widths of output and input on this rank) of every linear there."""
    from vllm.model_executor.layers.linear import LinearBase

    modules = [(name, m) for name, m in model.model.h[0].named_modules() if isinstance(m, LinearBase)]
    return sorted((name, type(m).__name__, _widths(m)) for name, m in modules)


def _widths(module: Any) -> tuple[int, int]:
    out = getattr(module, "output_size_per_partition", module.output_size)
    return out, getattr(module, "input_size_per_partition", module.input_size)
