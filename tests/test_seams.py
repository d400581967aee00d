"""Every name of vLLM and Transformers that is imported below the line, and the signatures we rely on.

The names are read from our own source, so the list cannot go stale. When a release moves something, this says what.
"""

import ast
import dataclasses
import importlib
import inspect
from pathlib import Path

import pytest

pytest.importorskip("vllm")

PACKAGE = Path(__file__).resolve().parents[1] / "tfbackend"
FOREIGN = ("vllm", "transformers")


def seams():
    """(module, name, where) of every foreign import; name is "" for a whole module."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            pairs = []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                pairs = [(node.module, alias.name) for alias in node.names]
            elif isinstance(node, ast.Import):
                pairs = [(alias.name, "") for alias in node.names]
            for module, name in pairs:
                if module.split(".")[0] in FOREIGN:
                    found.setdefault((module, name), f"{path.relative_to(PACKAGE).as_posix()}:{node.lineno}")
    return [(module, name, where) for (module, name), where in sorted(found.items())]


@pytest.mark.parametrize(("module", "name", "where"), seams(), ids=lambda value: value)
def test_name_is_where_we_import_it_from(module, name, where):
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        pytest.fail(f"{module} has gone; {where} needs it: {error}")
    if name and not hasattr(found, name):
        try:
            importlib.import_module(f"{module}.{name}")
        except ImportError:
            pytest.fail(f"{module} has no {name} any more; {where} needs it")


SIGNATURES = {
    # what is called: the parameters that we name or fill by position
    "vllm.model_executor.layers.linear:ColumnParallelLinear": "input_size output_size bias gather_output params_dtype "
    "quant_config prefix return_bias",
    "vllm.model_executor.layers.linear:RowParallelLinear": "input_size output_size bias input_is_parallel params_dtype "
    "quant_config prefix return_bias",
    "vllm.model_executor.layers.linear:ReplicatedLinear": "input_size output_size bias params_dtype quant_config "
    "prefix return_bias",
    "vllm.model_executor.layers.linear:MergedColumnParallelLinear": "input_size output_sizes bias params_dtype "
    "quant_config prefix return_bias",
    "vllm.model_executor.layers.linear:QKVParallelLinear": "hidden_size head_size total_num_heads total_num_kv_heads "
    "bias params_dtype quant_config prefix return_bias v_head_size",
    "vllm.model_executor.layers.attention:Attention": "num_heads head_size scale num_kv_heads cache_config "
    "quant_config logits_soft_cap per_layer_sliding_window prefix attn_backend",
    "vllm.model_executor.layers.fused_moe.layer:FusedMoEFactory": "num_experts top_k hidden_size intermediate_size "
    "params_dtype quant_config activation has_bias enable_eplb num_redundant_experts prefix renormalize gate "
    "custom_routing_function scoring_func routed_scaling_factor e_score_correction_bias use_grouped_topk "
    "num_expert_group topk_group shared_experts is_sequence_parallel router_logits_dtype",
    "vllm.model_executor.layers.fused_moe:GateLinear": "input_size output_size bias out_dtype prefix",
    "vllm.model_executor.layers.attention:MLAAttention": "num_heads scale qk_nope_head_dim qk_rope_head_dim v_head_dim "
    "q_lora_rank kv_lora_rank kv_b_proj cache_config quant_config prefix",
    "vllm.model_executor.layers.attention:MLAAttention.forward": "q kv_c_normed k_pe output_shape",
    "vllm.v1.attention.selector:get_attn_backend": "head_size dtype kv_cache_dtype use_mla num_heads "
    "has_sliding_window",
    "vllm.v1.attention.backend:subclass_attention_backend": "name_prefix attention_backend_cls builder_cls",
    "vllm.v1.attention.backends.mla.prefill:get_mla_prefill_backend": "vllm_config",
    "vllm.model_executor.layers.layernorm:RMSNorm": "hidden_size eps has_weight dtype",
    "vllm.model_executor.layers.layernorm:GemmaRMSNorm": "hidden_size eps",
    "vllm.model_executor.layers.activation:GeluAndMul": "approximate",
    "vllm.model_executor.layers.vocab_parallel_embedding:VocabParallelEmbedding": "num_embeddings embedding_dim "
    "params_dtype quant_config prefix",
    "vllm.model_executor.layers.vocab_parallel_embedding:ParallelLMHead": "num_embeddings embedding_dim bias "
    "params_dtype quant_config prefix",
    "vllm.model_executor.layers.logits_processor:LogitsProcessor": "vocab_size scale soft_cap",
    "vllm.model_executor.models.utils:WeightsMapper": "orig_to_new_prefix orig_to_new_stacked",
    "vllm.compilation.decorators:support_torch_compile": "dynamic_arg_dims",
    "vllm.model_executor.models.registry:ModelRegistry.register_model": "model_arch model_cls",
    "vllm.model_executor.models.registry:ModelRegistry._try_resolve_transformers": "architecture model_config",
    "vllm.model_executor.layers.attention:EncoderOnlyAttention": "num_heads head_size scale cache_config",
    "vllm.model_executor.layers.pooler:DispatchPooler.for_seq_cls": "pooler_config pooling classifier",
    "vllm.model_executor.layers.pooler:DispatchPooler.for_embedding": "pooler_config",
    "vllm.model_executor.layers.pooler.seqwise:pooler_for_classify": "pooler_config pooling",
    "vllm.model_executor.layers.pooler.tokwise:pooler_for_token_classify": "pooler_config classifier",
    "vllm.model_executor.layers.pooler:PoolingParamsUpdate": "requires_token_ids",
    "vllm.transformers_utils.config:get_hf_file_to_dict": "file_name model revision",
    "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn:QwenGatedDeltaNetAttention": "config vllm_config prefix "
    "gqa_interleaved_layout",
    "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn:QwenGatedDeltaNetAttention.forward": "hidden_states",
    "vllm.model_executor.layers.mamba.mamba_mixer2:MambaMixer2": "hidden_size ssm_state_size conv_kernel_size "
    "intermediate_size use_conv_bias use_bias n_groups num_heads head_dim rms_norm_eps use_rms_norm model_config "
    "cache_config quant_config prefix",
    "vllm.model_executor.layers.mamba.mamba_mixer2:MambaMixer2.forward": "hidden_states mup_vector",
    "vllm.model_executor.layers.mamba.mamba_mixer2:MambaMixer2.conv_ssm_forward": "projected_states output",
    "vllm.model_executor.layers.mamba.mamba_mixer2:MambaMixer2._warmup_ssd_kernels": "projected_states",
    "vllm.model_executor.layers.mamba.mamba_mixer2:Mixer2RMSNormGated": "full_hidden_size full_n_groups eps",
    "vllm.model_executor.layers.mamba.short_conv:ShortConv": "config dim layer_idx model_config cache_config "
    "quant_config prefix",
    "vllm.model_executor.layers.mamba.short_conv:ShortConv.forward": "hidden_states output",
    "vllm.v1.attention.backend:AttentionImpl": "alibi_slopes sliding_window",
}


def resolve(place):
    module, _, names = place.partition(":")
    found = importlib.import_module(module)
    for name in names.split("."):
        found = getattr(found, name)
    return found


@pytest.mark.parametrize("place", SIGNATURES)
def test_signature_has_what_we_pass(place):
    parameters = inspect.signature(resolve(place)).parameters
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    gone = [name for name in SIGNATURES[place].split() if name not in parameters]
    assert not gone or open_ended, f"{place} no longer takes {gone}; it takes {list(parameters)}"


def test_attention_interface_and_masks_of_transformers():
    from transformers import masking_utils
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    assert callable(ALL_ATTENTION_FUNCTIONS.register)
    assert callable(ALL_MASK_ATTENTION_FUNCTIONS.register)
    assert isinstance(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, dict)
    assert list(inspect.signature(masking_utils.find_packed_sequence_indices).parameters) == ["position_ids"]
    mask = inspect.signature(ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]).parameters
    assert {"q_length", "kv_length", "mask_function"} <= set(mask)


def test_registry_asks_what_the_plugin_answers():
    """plugin.py has a class of Transformers say yes while vLLM resolves to a class of ours."""
    from transformers import PreTrainedModel
    from vllm.config import ModelConfig
    from vllm.model_executor.models.registry import ModelRegistry

    source = inspect.getsource(inspect.unwrap(type(ModelRegistry)._try_resolve_transformers))
    assert ".is_backend_compatible()" in source
    assert isinstance(vars(PreTrainedModel)["is_backend_compatible"], classmethod)
    assert [*inspect.signature(ModelConfig._get_transformers_backend_cls).parameters] == ["self"]


def test_soft_cap_is_applied_before_the_scale():
    """head.py tells both in numbers only for this order."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    source = inspect.getsource(LogitsProcessor.forward)
    assert source.index("soft_cap") < source.index("self.scale")


def test_shards_of_a_qkv_projection_are_called_q_k_v():
    from vllm.model_executor.layers.linear import QKVParallelLinear

    source = inspect.getsource(QKVParallelLinear)
    assert all(f'"{shard}"' in source for shard in "qkv")


def test_the_engine_notes_who_chose_the_pooling():
    """mixins/pooling.py follows the user, then sentence-transformers' files, then the model's own class."""
    from vllm.config import ModelConfig

    source = inspect.getsource(ModelConfig)
    assert "self._pooler_config_sources = pooler_config_sources" in source
    for value in ('"user"', '"sentence_transformers"', '"model_default"'):
        assert value in source


def test_cls_means_whole_prompts():
    """models.py says "CLS" so that vLLM cuts no prompt and begins none from a cache."""
    from vllm.config import ModelConfig

    source = inspect.getsource(ModelConfig.attn_type.fget)
    assert "default_seq_pooling_type" in source and 'return "encoder_only"' in source


BACKENDS = "cpu_attn:CPUAttention flash_attn:FlashAttention triton_attn:TritonAttention"


@pytest.mark.parametrize("backend", BACKENDS.split())
def test_metadata_say_which_tokens_are_whose(backend):
    """What attention with a bias by distance reads, from the backends that it admits."""
    module, name = backend.split(":")
    metadata = resolve(f"vllm.v1.attention.backends.{module}:{name}Metadata")
    wanted = {"num_actual_tokens", "query_start_loc", "seq_lens", "block_table", "slot_mapping"}
    assert wanted <= {field.name for field in dataclasses.fields(metadata)}


def test_keys_lie_before_values():
    """Pages are [pages, KV heads, tokens, 2 * head size] to every layer, in whatever order they lie in memory."""
    from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl
    from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl

    for impl in (FlashAttentionImpl, TritonAttentionImpl):
        assert "kv_cache.transpose(1, 2).split(self.head_size, dim=-1)" in inspect.getsource(impl)


def test_both_windows_count_the_token_itself():
    """A window of attention both ways is as wide as one of causal attention, to either side."""
    from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

    assert "(sliding_window - 1, sliding_window - 1)" in inspect.getsource(FlashAttentionImpl.__init__)
