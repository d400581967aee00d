"""Ways to break a checkpoint, as data: what is done to the folder, and what the one error has to say."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
LAYER = "model.layers.1"


OURS, PYDANTIC = "tfbackend.errors.", "pydantic_core._pydantic_core.ValidationError"


@dataclass(frozen=True)
class Case:
    """A broken checkpoint.

    ``breaks`` changes the folder of a sound one. ``error`` is the class that starting an engine raises, and ``says``
    what its message has to hold: the thing, the place, the remedy. ``by_command`` is for what `tfbackend serve` checks
    before vLLM and Transformers are asked, whose own errors would be obscure.
    """

    name: str
    breaks: Callable[[Path], None]
    error: str
    says: tuple[str, ...]
    engine_args: dict[str, Any] = field(default_factory=dict)
    by_command: bool = False


@dataclass(frozen=True)
class Refusal:
    """The error that starting an engine ended with; its class is "" where the engine started."""

    error: str
    message: str


def start(folder: str, engine_args: dict[str, Any], by_command: bool = False) -> Refusal:
    """Start an engine and say what it raised. Runs in a forked child."""
    from vllm import LLM

    from tests.serve.engine import DEFAULT_ARGS
    from tfbackend.cli.serve import check_local_model

    try:
        if by_command:
            check_local_model(folder)
        LLM(model=folder, **(DEFAULT_ARGS | engine_args))
    except Exception as error:  # noqa: BLE001 - whatever it is, the test compares its class
        import traceback

        traceback.print_exc()
        cls = type(error)
        return Refusal(f"{cls.__module__}.{cls.__qualname__}", str(error))
    return Refusal("", "the engine started")


def edit_config(**fields: Any) -> Callable[[Path], None]:
    """Set fields of config.json; ``...`` removes one."""

    def breaks(folder: Path) -> None:
        path = folder / CONFIG
        config = json.loads(path.read_text()) | fields
        path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))

    return breaks


def edit_tensors(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """Read all shards, let ``change`` edit the tensors by name, write one file without an index."""

    def breaks(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        files = sorted(folder.glob("*.safetensors"))
        tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
        for file in (*files, folder / INDEX):
            file.unlink()
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return breaks


def removed(name: str) -> Callable[[Path], None]:
    return edit_tensors(lambda tensors: tensors.pop(name))


def renamed(old: str, new: str) -> Callable[[Path], None]:
    return edit_tensors(lambda tensors: tensors.update({new: tensors.pop(old)}))


def replaced(name: str, make: Callable[[Any], Any]) -> Callable[[Path], None]:
    return edit_tensors(lambda tensors: tensors.update({name: make(tensors[name]).contiguous()}))


def added(name: str) -> Callable[[Path], None]:
    return edit_tensors(lambda tensors: tensors.update({name: tensors["model.norm.weight"].clone()}))


def _shards(folder: Path) -> list[Path]:
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 2, "the sound checkpoint has several files"
    return shards


def missing_shard(folder: Path) -> None:
    _shards(folder)[1].unlink()


def truncated(folder: Path) -> None:
    shard = _shards(folder)[1]
    shard.write_bytes(shard.read_bytes()[:-200])


def not_downloaded(folder: Path) -> None:
    """What Git leaves where LFS was not installed."""
    _shards(folder)[0].write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12345\n")


def corrupt_index(folder: Path) -> None:
    path = folder / INDEX
    path.write_text(path.read_text()[:-30])


def index_without_map(folder: Path) -> None:
    (folder / INDEX).write_text('{"metadata": {}}')


def no_weights(folder: Path) -> None:
    for shard in (*_shards(folder), folder / INDEX):
        shard.unlink()


def pickled(folder: Path) -> None:
    """A .bin file that would run code when read."""
    no_weights(folder)
    import pickle

    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"model.norm.weight": print}))


def not_json(folder: Path) -> None:
    (folder / CONFIG).write_text('{"model_type": "llama", ')


def not_an_object(folder: Path) -> None:
    (folder / CONFIG).write_text('["llama"]')


def config_is_a_folder(folder: Path) -> None:
    (folder / CONFIG).unlink()
    (folder / CONFIG).mkdir()


def no_config(folder: Path) -> None:
    (folder / CONFIG).unlink()


def emptied(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("not a folder")


def remote_code(folder: Path) -> None:
    shutil.copy(Path(__file__).parent / "remote" / "sunken.py", folder)
    auto_map = {"AutoConfig": "sunken.SunkenConfig", "AutoModelForCausalLM": "sunken.SunkenForCausalLM"}
    edit_config(model_type="sunken", architectures=["SunkenForCausalLM"], auto_map=auto_map)(folder)


def pickled_tensors(folder: Path) -> None:
    """A .bin file of tensors alone, which is read without running code."""
    import torch
    from safetensors.torch import load_file

    tensors = {name: tensor for file in _shards(folder) for name, tensor in load_file(file).items()}
    no_weights(folder)
    torch.save(tensors, folder / "pytorch_model.bin")


def untouched(folder: Path) -> None:
    """The sound checkpoint."""


_Q, _QKV = f"{LAYER}.self_attn.q_proj.weight", f"{LAYER}.self_attn.qkv_proj.weight (shard q)"
_SHARD = "model-00002-of-00005.safetensors"
_AGAIN = "download the checkpoint again"

# fmt: off
CASES: tuple[Case, ...] = (
    # files
    Case("missing file", missing_shard, OURS + "CheckpointError", (_SHARD, "missing", _AGAIN)),
    Case("truncated file", truncated, OURS + "CheckpointError", ("damaged", f"Where: {_SHARD} in ", _AGAIN)),
    Case("pointer instead of file", not_downloaded, OURS + "CheckpointError", ("damaged", "model-00001-of-", _AGAIN)),
    Case("corrupt index", corrupt_index, OURS + "CheckpointError", (f"Where: {INDEX} in ", "Download the index again")),
    Case("index without map", index_without_map, OURS + "CheckpointError", (INDEX, "weight_map")),
    Case("no weights", no_weights, OURS + "CheckpointError", ("no weights", "Found: config.json", "save_pretrained")),
    Case("pickled code", pickled, OURS + "CheckpointError", ("pytorch_model.bin", "run code", ".safetensors")),
    # tensors
    Case("integers", replaced(_Q, lambda t: t.char()), OURS + "ShapeMismatchError",
         (f"{_Q} for {_QKV}", "Found: torch.int8", "Needed: torch.float32", "config.json belongs to these weights")),
    Case("wrong shape", replaced(_Q, lambda t: t[:-1]), OURS + "ShapeMismatchError",
         (f"{_Q} for {_QKV}", "Found: (255, 128)", "Needed: (256, 128)", "config.json belongs to these weights")),
    Case("transposed", replaced(f"{LAYER}.mlp.down_proj.weight", lambda t: t.T), OURS + "ShapeMismatchError",
         (f"{LAYER}.mlp.down_proj.weight", "Found: (192, 128)", "Needed: (128, 192)")),
    Case("rows too many", replaced("model.embed_tokens.weight", lambda t: t.repeat(2, 1)), OURS + "ShapeMismatchError",
         ("model.embed_tokens.weight", "Found: (1000, 128)", "Needed: (500, 128)", "vocab_size")),
    Case("head of another vocabulary", replaced("lm_head.weight", lambda t: t[:-3]), OURS + "ShapeMismatchError",
         ("lm_head.weight", "Found: (497, 128)", "Needed: (500, 128)", "vocab_size")),
    Case("renamed tensor", renamed(_Q, f"{LAYER}.self_attn.query.weight"), OURS + "MissingTensorError",
         (f"Where: {_QKV}", f"Needed: {_Q}", f"nearest: {LAYER}.self_attn.query.weight", "under another name")),
    Case("extra tensor", added("model.layers.7.input_layernorm.weight"), OURS + "UnexpectedTensorError",
         ("Where: model.layers.7.input_layernorm.weight", "more layers than config.json has")),
    Case("missing norm", removed("model.norm.weight"), OURS + "MissingTensorError",
         ("Where: model.norm.weight", "the checkpoint lacks model.norm.weight", "every shard file")),
    Case("missing shard", removed(f"{LAYER}.mlp.up_proj.weight"), OURS + "MissingTensorError",
         (f"Where: {LAYER}.mlp.gate_up_proj.weight (shard 1)", f"Needed: {LAYER}.mlp.up_proj.weight")),
    # configs
    Case("too few layers", edit_config(num_hidden_layers=1), OURS + "UnexpectedTensorError",
         ("9 tensors", f"{LAYER}.mlp.up_proj.weight", "more layers than config.json has")),
    Case("too many layers", edit_config(num_hidden_layers=3), OURS + "MissingTensorError",
         ("9 parameters or shards", "model.layers.2.self_attn.qkv_proj.weight (shard k)")),
    Case("not a number", edit_config(rms_norm_eps=float("nan")), OURS + "ConfigError",
         ("Where: config.json: rms_norm_eps", "Found: nan", "a finite number")),
    Case("not a number, deep", edit_config(rope_parameters={"rope_type": "default", "rope_theta": float("inf")}),
         OURS + "ConfigError", ("Where: config.json: rope_parameters.rope_theta", "Found: inf")),
    Case("no KV heads", edit_config(num_key_value_heads=0), OURS + "ConfigError",
         ("Where: config.json: num_key_value_heads", "Found: 0", "Needed: 1 or more")),
    Case("no heads", edit_config(num_attention_heads=0), OURS + "ConfigError",
         ("Where: config.json: num_attention_heads", "Found: 0", "Needed: 1 or more"), by_command=True),
    Case("uneven heads", edit_config(num_key_value_heads=3), OURS + "ConfigError",
         ("num_attention_heads", "4 query heads, 3 KV heads", "a multiple")),
    Case("unknown activation", edit_config(hidden_act="nosuch"), OURS + "ConfigError",
         ("Where: config.json: hidden_act", "'nosuch', which Transformers does not know", "was published with")),
    Case("text for a number", edit_config(num_attention_heads="4"),
         "huggingface_hub.errors.StrictDataclassFieldValidationError", ("num_attention_heads", "int, got str")),
    Case("unknown architecture", edit_config(model_type="nosuchmodel", architectures=["NoSuchForCausalLM"]), PYDANTIC,
         ("model type `nosuchmodel`", "does not recognize this architecture", "update Transformers")),
    Case("no architectures", edit_config(architectures=...), OURS + "ConfigError",
         ("config.json: architectures", "LlamaForCausalLM", "--hf-overrides"), by_command=True),
    Case("remote code", remote_code, PYDANTIC, ("contains custom code", "trust_remote_code=True")),
    Case("heads over three ranks", untouched, PYDANTIC, ("attention heads (4)", "divisible by", "parallel size (3)"),
         {"tensor_parallel_size": 3}),
    # folders
    Case("not JSON", not_json, "builtins.OSError", ("config.json' is not a valid JSON file",)),
    Case("JSON list", not_an_object, OURS + "CheckpointError", ("config.json is not", "a JSON list"), by_command=True),
    Case("config is a folder", config_is_a_folder, OURS + "CheckpointError", ("config.json cannot be read",),
         by_command=True),
    Case("no config", no_config, PYDANTIC, ("no config", "presence of a 'config.json'")),
    Case("empty folder", emptied, PYDANTIC, ("empty folder", "presence of a 'config.json'")),
    Case("file for a folder", a_file, OURS + "CheckpointError", ("The model is a file", "a folder"), by_command=True),
)
# fmt: on


def make_sound(folder: str) -> None:
    """Make the checkpoint that is broken: a tiny llama in several files."""
    from tests.serve.tiny import VARIANTS, make_checkpoint

    make_checkpoint(VARIANTS["llama"], Path(folder), max_shard_size="400KB")
