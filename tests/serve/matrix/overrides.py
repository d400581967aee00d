"""What no rule can know: fields of single architectures. ``...`` leaves a field to the class, None for a sub-config
leaves it out, a dict for one overrides its fields."""

from typing import Any

from tests.serve.configs import MAX_LEN, WINDOW

S, F, C = "sliding_attention", "full_attention", "conv"
L, H = "linear_attention", "hybrid"
_ROPE = {"rope_type": "default", "rope_theta": 1000.0}
_GEMMA4_TEXT = {
    "num_hidden_layers": 6,
    "layer_types": [S, F] * 3,
    "num_kv_shared_layers": 2,
    "head_dim": 32,
    "global_head_dim": 64,
}
_GEMMA3N_TEXT = {
    "num_hidden_layers": 6,
    "layer_types": [S, F] * 3,
    "num_kv_shared_layers": 2,
    "activation_sparsity_pattern": [0.95] * 3 + [0.0] * 3,
    "laurel_rank": 16,
}
_QWEN4 = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 64,
    "indexer_budget": WINDOW,
    "indexer_compress_ratio": 4,
    "hc_lowrank": 16,
}
_TINY_VISION = {"hidden_size": 64, "image_size": 32, "patch_size": 16, "num_attention_heads": 2}

OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"num_hidden_layers": 4, "attn_layer_indices": [1, 3]},
    "blt": {
        "encoder_config": {"hidden_size_global": 256},
        "decoder_config": {"hidden_size_global": 256},
        "global_config": {"hidden_size": 256},
        "encoder_hash_byte_group_vocab": 500,
    },
    "cohere_compass_text": {
        "num_hidden_layers": 4,
        "layer_types": [S, F] * 2,
        "rope_parameters": {S: _ROPE, F: None},  # as published: no positions on the layers of full attention
        "head_dim": 128,  # its sections of the rotary dimension add up to 64
        "logit_scale": 0.4,
    },
    "cwm": {"eos_token_id": 2},
    "dbrx": {"attn_config": {"rope_theta": 1000.0, "clip_qkv": 2.0}},
    "diffllama": {"attention_dropout": ...},  # refused by the class
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1},
    "falcon_h1": {"mamba_d_ssm": 256},
    "fuyu": {"text_config": {}},
    "gemma3n": {"text_config": _GEMMA3N_TEXT, "vision_config": None, "audio_config": None},
    "gemma3n_text": _GEMMA3N_TEXT,
    "gemma4": {"text_config": _GEMMA4_TEXT, "vision_config": None, "audio_config": None},
    "gemma4_text": _GEMMA4_TEXT,
    "gemma4_unified": {"text_config": _GEMMA4_TEXT},
    "gemma4_unified_text": _GEMMA4_TEXT,
    "got_ocr2": {
        "text_config": {},
        "vision_config": _TINY_VISION
        | {"mlp_dim": 64, "output_channels": 32, "window_size": 2, "global_attn_indexes": [1]},
    },
    "granitemoehybrid": {"num_hidden_layers": 4, "layer_types": [L, F] * 2},
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]]},
    "hyperclovax": {"attention_multiplier": 0.4},
    "inkling_text": {  # layers of each kind, biases that reach less far than prompts, scores that grow
        "layer_types": ["hybrid_sliding", "hybrid"] * 2,
        "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
        "swa_num_key_value_heads": 4,
        "rel_extent": 24,
        "log_scaling_n_floor": 8,
        "log_scaling_alpha": 0.7,
        "logits_mup_width_multiplier": 2.0,
    },
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"num_hidden_layers": 4, "layer_types": [C, F] * 2, "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {"num_hidden_layers": 4, "layer_types": [C, F] * 2, "num_dense_layers": 2},
    "llama4_text": {  # layers of each kind in turn, chunks of whole blocks, and the prompts longer than they
        "num_hidden_layers": 4,
        "layer_types": ["chunked_attention", F] * 2,
        "no_rope_layers": [1, 0] * 2,
        "moe_layers": [0, 1, 3],
        "attention_chunk_size": 2 * WINDOW,
    },
    "longcat_flash": {"zero_expert_num": 4, "moe_topk": 3},  # or hardly a token meets an expert with weights
    "mpt": {"attn_config": {"attn_pdrop": ..., "clip_qkv": 2.0}, "logit_scale": 0.4},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"] * 2},
    "phi4_multimodal": {
        "vision_config": _TINY_VISION | {"crop_size": 32, "image_token_id": 1},
        "audio_config": {"hidden_size": 64, "num_blocks": 1, "ext_pw_out_channel": 64, "nemo_conv_channels": 32},
    },
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "recurrent_gemma": {"num_hidden_layers": 4, "block_types": ["recurrent", "attention"]},
    "reformer": {
        "axial_pos_shape": [16, 32],
        "axial_pos_embds_dim": [32, 96],
        "attn_layers": ["local", "lsh"],
        "local_attn_chunk_length": WINDOW,
        "lsh_attn_chunk_length": WINDOW,
    },
    "rwkv": {"num_hidden_layers": 4, "rescale_every": 2},  # as published, but of more than six layers
    "xlm": {"emb_dim": 128, "causal": True},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "layers_block_type": [L, H] * 2,
        "attention_hidden_size": 256,  # twice the hidden size, as published
    },
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": [L, H] * 2},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip

# The rules give latent attention the widths that vLLM has a kernel for on a CPU; of these it has none.
_NO_KERNEL = {"kv_lora_rank": 96, "v_head_dim": 32}
# vLLM's kernels for a CPU have no gated delta rule over the smaller ones of the rules.
_HEADS_OF_64 = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
# Without a factor for the angles themselves, so that only the scale of the scores has one.
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}

# Switches that change what a class computes, on top of the overrides of their architecture: "model_type+variant".
VARIANTS: dict[str, dict[str, Any]] = {
    "bart+scaled": {"scale_embedding": True},
    "bert+encoder": {"is_decoder": False},
    "bloom+postnorm": {"apply_residual_connection_post_layernorm": True},
    "codegen+inner": {"n_inner": None, "tie_word_embeddings": True},
    "deepseek_v2+wholequery": {"q_lora_rank": None},
    "deepseek_v3+halves": {"rope_interleave": False},
    "deepseek_v3+padded": _NO_KERNEL,
    "deepseek_v3+yarn": {"rope_parameters": _YARN},
    "doge+whole": {"sliding_window": None, "keep_window_size": MAX_LEN // 2},
    "falcon+alibi": {"alibi": True, "multi_query": False, "num_kv_heads": 4, "parallel_attn": False},
    "falcon+alibi-parallel": {"alibi": True, "bias": False},
    "falcon+grouped": {"new_decoder_architecture": True},
    "falcon+heads": {"multi_query": False, "num_kv_heads": 4, "tie_word_embeddings": False},
    "falcon_h1+normed": {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "projectors_bias": True},
    "gemma4_text+keys-as-values": {"attention_k_eq_v": True},
    "gemma4_text+wide": {"use_double_wide_mlp": True},
    "gpt2+inverse": {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True},
    "gpt2+unscaled": {"scale_attn_weights": False, "tie_word_embeddings": False},
    "gpt_neo+local": {"attention_types": [[["local"], 4]]},
    "gptj+tied": {"rotary_dim": 32, "tie_word_embeddings": True},
    "hyperclovax+prenorm": {"use_post_norm": False},
    "modernbert-decoder+normbias": {"norm_bias": True, "decoder_bias": False},
    "mamba2+one-group": {"n_groups": 1, "use_bias": True},
    "minicpm3+padded": _NO_KERNEL,
    "mpt+bias": {"no_bias": False, "logit_scale": None},
    "mpt+keynorm": {"attn_config": {"attn_pdrop": ..., "qk_ln": True, "softmax_scale": 0.3}},
    "olmo+clip": {"clip_qkv": 1.0},
    "olmo_hybrid+heads-of-64": _HEADS_OF_64 | {"linear_allow_neg_eigval": False},
    "qwen3_5_moe_text+heads-of-64": _HEADS_OF_64,
    "qwen3_5_text+heads-of-64": _HEADS_OF_64,
    "qwen3_next+heads-of-64": _HEADS_OF_64,
    "xglm+unscaled": {"scale_embedding": False},
    "youtu+wholequery": {"q_lora_rank": None},
}

# Architectures of the mapping that are no language model by themselves, each with its reason. They are not attempted.
EXCLUDED: dict[str, str] = {
    "gemma3n": "needs the timm package even for text; gemma3n_text is its language model",
    "gemma4_assistant": "drafts for another model and needs that model's hidden states",
    "gemma4_unified_assistant": "drafts for another model and needs that model's hidden states",
    "musicgen": "its tokens are sound, several codebooks at once",
    "musicgen_melody": "its tokens are sound, several codebooks at once",
}

# Architectures that Transformers asks with its cache: without one they answer otherwise, by its own code, each for a
# reason. An engine decodes, so it can match one side only.
CACHED: dict[str, str] = {
    "nemotron_h": "clamps the time step where it prefills, and not where it decodes",
    "zamba2": "clamps the time step where it prefills, and not where it decodes",
}
