"""What kind of architecture one is, told from its classes and its tiny model, never from its name.

dense      decoder-only text, neither experts nor recurrent state
moe        decoder-only text with experts
recurrent  a state other than the key/value cache: state space, linear attention, convolutions over tokens
encoder    an encoder class used as a decoder by ``is_decoder``
seq2seq    the decoder of an encoder-decoder class
multimodal a class that wants more than text, even where it can do with text alone
bidirectional  its tokens see the tokens after them (checkpoint.py tries it), so no engine can generate with it
"""

from typing import Any

BIDIRECTIONAL = "bidirectional"
KINDS = ("dense", "moe", "recurrent", "encoder", "seq2seq", "multimodal", BIDIRECTIONAL)

_RECURRENT_TYPES = {"linear_attention", "mamba", "conv", "recurrent", "hybrid", "hybrid_sliding"}
_TEXT_CONFIGS = {"attn_config", "ffn_config", "patcher_config", "encoder_config", "decoder_config", "global_config"}


def classify(name: str, model: Any) -> str:
    """Return the kind of an architecture or variant, given its model (on meta will do)."""
    from transformers import CONFIG_MAPPING

    model_type = name.partition("+")[0]
    config_class = CONFIG_MAPPING[model_type]
    if set(config_class.sub_configs) - _TEXT_CONFIGS:
        return "multimodal"
    fields = set(config_class.__dataclass_fields__)
    if fields & {"decoder_layers", "num_decoder_layers"}:
        return "seq2seq"
    if _fills_masks(model_type) or {"is_decoder", "add_cross_attention"} <= fields:
        return "encoder"
    if _is_recurrent(model):
        return "recurrent"
    return "moe" if any("Expert" in type(module).__name__ for module in model.modules()) else "dense"


def _fills_masks(model_type: str) -> bool:
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    return model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES


def _is_recurrent(model: Any) -> bool:
    from torch import nn

    kinds = set(getattr(model.config, "layer_types", None) or ())
    convolves = any(isinstance(module, nn.Conv1d) for module in model.modules())
    return bool(getattr(model, "_is_stateful", False) or kinds & _RECURRENT_TYPES or convolves)
