"""Between vLLM's configuration and ours: VllmConfig -> ServingSpec and BuildContext, weight places -> WeightsMapper."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig
from vllm import envs
from vllm.config import CacheConfig, CompilationMode, CUDAGraphMode, VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.models.utils import WeightsMapper

from tfbackend import meta
from tfbackend.errors import UnsupportedModelError
from tfbackend.layers.context import BuildContext
from tfbackend.layers.mla import HIDDEN_RANK, mla_sizes
from tfbackend.layers.native import native_kinds
from tfbackend.layerspecs import AttentionSpec
from tfbackend.mlaspec import MLASpec
from tfbackend.plan import Plan
from tfbackend.serving import ServingSpec

logger = init_logger("vllm.tfbackend")


def serving_spec(config: VllmConfig) -> ServingSpec:
    """The planner's view of the engine."""
    model, parallel = config.model_config, config.parallel_config
    return ServingSpec(
        dtype=model.dtype,
        tp_size=parallel.tensor_parallel_size,
        pp_size=parallel.pipeline_parallel_size,
        ep=parallel.enable_expert_parallel,
        sequence_parallel_moe=parallel.use_sequence_parallel_moe,
        quantization=model.quantization,
        max_model_len=model.max_model_len,
        max_tokens=config.scheduler_config.max_num_batched_tokens,
        device=config.device_config.device_type,
        compiled=config.compilation_config.mode != CompilationMode.NONE,
        whole_prompts=_whole_prompts(config),
        mla=mla_sizes(config),
        natives=_natives(config),
        stateless=_stateless(config),
    )


def _natives(config: VllmConfig) -> frozenset[str] | str:
    """TFBACKEND_NATIVE_STATE=0 has every mixer with state run as Transformers wrote it."""
    if os.environ.get("TFBACKEND_NATIVE_STATE") == "0":
        return "TFBACKEND_NATIVE_STATE=0 is set"
    return native_kinds(config)


def _stateless(config: VllmConfig) -> str:
    """Why vLLM keeps no state of a request, "" where it does."""
    if config.num_speculative_tokens:
        return "speculative decoding takes back tokens, and its state cannot be taken back"
    model = config.model_config
    if not (model.is_hybrid or model.is_attention_free):
        return "Transformers' cache for its config has no state"
    return ""


def _whole_prompts(config: VllmConfig) -> bool:
    """Whether each call holds whole prompts: those of a pooling model, neither cut nor begun from a cache."""
    pooling = config.model_config.runner_type == "pooling"
    return pooling and not (config.scheduler_config.enable_chunked_prefill or config.cache_config.enable_prefix_caching)


def build_context(config: VllmConfig) -> BuildContext:
    """What builders of layers take from the engine."""
    return BuildContext(
        dtype=config.model_config.dtype,
        device=torch.device(config.load_config.device or config.device_config.device),
        quant_config=config.quant_config,
        cache_config=_without_window(config.cache_config),
        tp_size=config.parallel_config.tensor_parallel_size,
        eplb=config.parallel_config.enable_eplb,
        redundant_experts=config.parallel_config.eplb_config.num_redundant_experts,
        sequence_parallel_moe=config.parallel_config.use_sequence_parallel_moe,
    )


def hf_config(config: VllmConfig) -> PretrainedConfig:
    """The config to build the model from: vLLM's, or where vLLM reads the file with the config class of another
    architecture, Transformers' own reading of it, with the user's overrides."""
    model = config.model_config
    given: PretrainedConfig = _with_latents(model.hf_config)
    wanted = meta.named_config_class(given)
    if wanted is None or isinstance(given, wanted):
        return given
    path = model.hf_config_path or model.model
    where = {"revision": None if model.hf_config_path else model.revision, "token": model.hf_token}
    values, _ = PretrainedConfig.get_config_dict(path, **where)
    if values.get("model_type") != wanted.model_type or "auto_map" in values:
        return given
    # Not AutoConfig: vLLM tells it to read this model type with the other class.
    read: PretrainedConfig = wanted.from_pretrained(path, **where)
    if callable(model.hf_overrides):
        overridden: PretrainedConfig = model.hf_overrides(read)
        return overridden
    _override(read, model.hf_overrides)
    return read


def _override(config: PretrainedConfig, overrides: Mapping[str, Any]) -> None:
    for name, value in overrides.items():
        inner = getattr(config, name, None)
        if isinstance(value, dict) and isinstance(inner, PretrainedConfig):
            _override(inner, value)
        else:
            setattr(config, name, inner | value if isinstance(value, dict) and isinstance(inner, dict) else value)


def cache_whole(config: VllmConfig) -> None:
    """Let vLLM lay out a cache of whole keys and values for a model with state, though its config has latents.

    On a CPU its attention over latents wants blocks of 16 tokens, and no prefix caching, neither of which goes with
    pages of state. vLLM decides by `kv_lora_rank` alone, so that is hidden from it; `hf_config` has it again.
    """
    model, text = config.model_config, config.model_config.hf_text_config
    if config.device_config.device_type == "cpu" and model.use_mla and not hasattr(text, HIDDEN_RANK):
        vars(text)[HIDDEN_RANK] = text.kv_lora_rank
        vars(text)["kv_lora_rank"] = None
        logger.info("vLLM has no cache of latents beside state on a CPU: keys and values are cached whole")


def _with_latents(config: PretrainedConfig) -> PretrainedConfig:
    if not hasattr(config.get_text_config(), HIDDEN_RANK):
        return config
    config = copy.deepcopy(config)
    text = vars(config.get_text_config())
    text["kv_lora_rank"] = text.pop(HIDDEN_RANK)
    return config


def check_stages(config: VllmConfig) -> None:
    """Refuse what vLLM would crash at: on a CPU it makes room for what a stage is handed only as it compiles.

    Raises:
        UnsupportedModelError: there are several stages on a CPU, and nothing is compiled.
    """
    stages, mode = config.parallel_config.pipeline_parallel_size, config.compilation_config.mode
    if stages > 1 and mode == CompilationMode.NONE and config.device_config.device_type == "cpu":
        raise UnsupportedModelError(
            "vLLM runs pipeline stages on a CPU only where it compiles the model.",
            where="the engine",
            found="--enforce-eager",
            remedy="Serve it without --enforce-eager, or with --pipeline-parallel-size 1",
        )


def settle_cache(config: VllmConfig, plan: Plan) -> None:
    """Tell the engine which cache the plan has; call it before layers are built.

    vLLM takes every config with `kv_lora_rank` for a cache of latents, and on a CPU fixes the blocks of 16 tokens that
    its kernel for those needs. Where the plan keeps whole keys and values all the same, the kernel takes multiples of
    32. Where it does keep latents, vLLM's metadata want the width of one in the cache for the width of a head, which
    they have for listed model types alone. The engine reads the rest off the layers.
    """
    cache, model = config.cache_config, config.model_config
    specs = [spec for _, spec in plan.attention]
    latent = next((spec for spec in specs if isinstance(spec, MLASpec)), None)
    if latent is not None:
        model.model_arch_config.head_size = latent.sizes.cached
    elif hasattr(model.hf_text_config, HIDDEN_RANK):
        whole = (spec.head_dim for spec in specs if isinstance(spec, AttentionSpec))
        model.model_arch_config.head_size = max(whole, default=model.model_arch_config.head_size)
    elif model.use_mla and config.device_config.device_type == "cpu" and cache.block_size % 32:
        cache.block_size = 128


def settle_alone(config: VllmConfig, plan: Plan) -> None:
    """Keep the engine from capturing a model that runs prompt by prompt: how many calls there are is never the same."""
    if plan.alone:
        config.compilation_config.mode = CompilationMode.NONE
        config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE


def settle_chunks(config: VllmConfig, plan: Plan) -> None:
    """Give the KV cache blocks of which each chunk that attention keeps to has whole ones; call it before layers are
    built.

    Raises:
        UnsupportedModelError: no blocks that the kernels take divide the chunks.
    """
    chunks = {path: spec.chunk for path, spec in plan.attention if spec.chunk is not None}
    cache, least = config.cache_config, 32 if config.device_config.device_type == "cpu" else 16
    fitting = math.gcd(cache.block_size, *chunks.values())
    if fitting == cache.block_size:
        return
    if fitting % least:
        raise UnsupportedModelError(
            "Attention within chunks needs chunks of whole blocks of the KV cache.",
            where=next(iter(chunks)),
            found=f"chunks of {', '.join(map(str, sorted(set(chunks.values()))))} tokens",
            needed=f"multiples of {least}",
        )
    cache.block_size = fitting


def _without_window(cache: CacheConfig) -> CacheConfig:
    """vLLM gives its attention layers the window of the whole model where they have none, and ours say what they have:
    a config may name a window that no layer of the Transformers class uses."""
    if cache.sliding_window is None:
        return cache
    cache = copy.copy(cache)
    cache.sliding_window = None
    return cache


def cache_directory() -> Path:
    """Where proofs, generated forwards and reports are kept: TFBACKEND_CACHE, or a folder in vLLM's cache."""
    return Path(os.environ.get("TFBACKEND_CACHE") or Path(envs.VLLM_CACHE_ROOT) / "tfbackend")


def weights_mapper(plan: Plan) -> WeightsMapper:
    """The plan's places in the form that quantization configs, LoRA and bitsandbytes read."""
    prefixes: dict[str, str | None] = {}
    if plan.base_path != "model":
        prefixes[f"{plan.base_path}." if plan.base_path else ""] = "model."
    if plan.head_path and plan.head_path != "lm_head":
        prefixes[f"{plan.head_path}."] = "lm_head."
    stacked = {
        f".{entry.source}.": (f".{entry.target}.", entry.shard)
        for rewrite in plan.rewrites
        for entry in rewrite.weights
        if entry.shard is not None
    }
    return WeightsMapper(orig_to_new_prefix=prefixes, orig_to_new_stacked=stacked)


def packed_modules(plan: Plan) -> dict[str, list[str]]:
    """Merged child -> the children it was merged from, in order."""
    packed: dict[str, list[str]] = {}
    for rewrite in plan.rewrites:
        for entry in rewrite.weights:
            if entry.shard is not None and entry.source not in packed.setdefault(entry.target, []):
                packed[entry.target].append(entry.source)
    return packed
