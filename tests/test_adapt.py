"""The config that a model is built from, where vLLM's reading of config.json is another architecture's."""

import json
from types import SimpleNamespace

import pytest
from transformers import DeepseekV3Config, DeepseekV32Config, LlamaConfig

pytest.importorskip("vllm")

from tfbackend import adapt
from tfbackend.meta import named_config_class

ARCHITECTURE = {"architectures": ["DeepseekV32ForCausalLM"]}


def engine(given, folder, overrides=None, **fields):
    usual = {"hf_config_path": None, "revision": None, "hf_token": None, "trust_remote_code": False}
    model = SimpleNamespace(hf_config=given, model=str(folder), hf_overrides=overrides or {}, **(usual | fields))
    return SimpleNamespace(model_config=model)


@pytest.fixture
def folder(tmp_path):
    config = DeepseekV32Config(**ARCHITECTURE, index_topk=77, num_hidden_layers=3, rope_parameters={
        "rope_type": "default", "rope_theta": 123.0,
    })  # fmt: skip
    config.save_pretrained(tmp_path)
    return tmp_path


def as_vllm_reads(folder):
    return DeepseekV3Config.from_dict(json.loads((folder / "config.json").read_text()))


def test_a_config_of_another_class_is_read_again_with_its_own(folder):
    given = as_vllm_reads(folder)
    assert type(given) is DeepseekV3Config
    read = adapt.hf_config(engine(given, folder))
    assert type(read) is DeepseekV32Config
    assert (read.index_topk, read.num_hidden_layers, read.rope_parameters["rope_theta"]) == (77, 3, 123.0)
    assert type(adapt.hf_config(engine(given, "elsewhere", hf_config_path=str(folder)))) is DeepseekV32Config


def test_overrides_are_kept(folder):
    given = as_vllm_reads(folder)
    overrides = {"index_topk": 9, "rope_parameters": {"rope_theta": 5.0}}
    read = adapt.hf_config(engine(given, folder, overrides))
    assert read.index_topk == 9
    assert read.rope_parameters == {"rope_type": "default", "rope_theta": 5.0}

    def change(config):
        config.index_topk = 8
        return config

    assert adapt.hf_config(engine(given, folder, change)).index_topk == 8


def test_a_config_of_the_right_class_is_taken_as_it_is(folder):
    given = DeepseekV32Config(**ARCHITECTURE)
    assert adapt.hf_config(engine(given, "no such folder")) is given
    plain = LlamaConfig()
    assert adapt.hf_config(engine(plain, "no such folder")) is plain


@pytest.mark.parametrize("change", [{"model_type": "own"}, {"auto_map": {"AutoConfig": "own.Own"}}])
def test_a_file_that_is_for_another_class_is_left_to_the_one_that_read_it(folder, change):
    given = as_vllm_reads(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert adapt.hf_config(engine(given, folder)) is given


@pytest.mark.parametrize("named", [None, [], ["LlamaModel"], ["OwnForCausalLM"]])
def test_only_language_models_of_transformers_name_a_config_class(named):
    config = LlamaConfig(architectures=named)
    assert named_config_class(config) is None
    config.architectures = ["DeepseekV32ForCausalLM"]
    assert named_config_class(config) is DeepseekV32Config
