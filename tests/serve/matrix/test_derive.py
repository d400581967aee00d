"""The tiny configs: derivable for every architecture, small, and with what a rule says must show."""

from typing import Any

import pytest

from tests.serve.matrix.derive import architectures, model_type_of, shrunk_fields, tiny_config
from tests.serve.matrix.overrides import OVERRIDES, VARIANTS
from tests.serve.matrix.results import attempted
from tests.serve.matrix.rules import RULES, shrink_blocks, shrink_field, shrink_rope, shrink_types


@pytest.mark.parametrize("name", attempted())
def test_config_is_small(name: str) -> None:
    text = tiny_config(name).get_text_config()
    for field, most in {"vocab_size": 500, "num_hidden_layers": 8, "hidden_size": 256}.items():
        assert getattr(text, field, 0) <= most, field


@pytest.mark.parametrize("name", attempted())
def test_each_kind_of_layer_comes_twice(name: str) -> None:
    types = getattr(tiny_config(name).get_text_config(), "layer_types", None) or ()
    assert all(list(types).count(kind) >= 2 for kind in types)


def test_overrides_name_fields_of_the_class() -> None:
    """A misspelt field would be kept by Transformers and change nothing."""
    from transformers import CONFIG_MAPPING

    extra = {"head_dim", "global_head_dim", "rope_theta"}  # taken from the keywords by some class or model
    for name, fields in (OVERRIDES | VARIANTS).items():
        if model_type_of(name) in architectures():
            _check(name, CONFIG_MAPPING[model_type_of(name)], fields, extra)


def _check(name: str, config_class: Any, fields: dict[str, Any], extra: set[str]) -> None:
    known = set(config_class.__dataclass_fields__) | set(config_class.attribute_map) | set(dir(config_class)) | extra
    assert not set(fields) - known, f"{name}: {config_class.__name__} has no {sorted(set(fields) - known)}"
    for sub, own in fields.items():
        if sub in config_class.sub_configs and isinstance(own, dict):
            sub_class = config_class.sub_configs[sub]
            if hasattr(sub_class, "__dataclass_fields__"):
                _check(f"{name}.{sub}", sub_class, own, extra)


def test_rules_by_name_and_default() -> None:
    assert shrink_field("decoder_ffn_dim", 4096) == 192
    assert shrink_field("encoder_layers", 12) == 2
    assert shrink_field("n_head", 16) == 4
    assert shrink_field("attention_bias", False) is True
    assert shrink_field("embedding_multiplier", 1.0) == 0.6
    assert shrink_field("embedding_multiplier", 12.0) == 12.0
    assert shrink_field("depthwise_multiplier", 1) == 1
    assert shrink_field("image_token_id", 258880) == 1
    assert shrink_field("image_token_id", 3) == 3
    assert shrink_field("hidden_act", "silu") is ...
    assert shrink_field("mamba_proj_bias", False) is ...


def test_no_rule_hides_a_later_one() -> None:
    assert len({pattern for pattern, _ in RULES}) == len(RULES)


def test_layers_of_each_kind_pair_up() -> None:
    types = shrink_types(["sliding", "sliding", "full"], 4)
    blocks = shrink_blocks(["dense", "sparse", "sparse"], 4)
    assert types == ["sliding", "full", "sliding", "full"]
    assert blocks == ["dense", "dense", "sparse", "sparse"]
    assert len(set(zip(types, blocks, strict=True))) == 4


def test_rope_keeps_its_kind_and_comes_to_its_maximum() -> None:
    rope = {"full_attention": {"rope_type": "yarn", "original_max_position_embeddings": 4096, "factor": 2.0}}
    assert shrink_rope(rope)["full_attention"] == {
        "rope_type": "yarn",
        "original_max_position_embeddings": 32,
        "factor": 2.0,
    }
    assert shrink_rope(None) is None


def test_an_override_of_dots_leaves_a_field_to_the_class() -> None:
    from transformers import LlamaConfig

    fields = shrunk_fields(LlamaConfig, {"attention_dropout": ..., "rms_norm_eps": 0.5})
    assert "attention_dropout" not in fields
    assert fields["rms_norm_eps"] == 0.5
