"""MODEL as a repository of the Hub, without a network: what the Hub would answer is put in its place."""

from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
from transformers import LlamaConfig

from tfbackend.errors import ConfigError
from tfbackend.inspection import target
from tfbackend.inspection.headers import TensorHeader
from tfbackend.inspection.sizes import bytes_text, count_text, parse_bytes, ranges


@pytest.fixture
def hub(tiny_llama, tmp_path, monkeypatch):
    """A repository whose config has been downloaded and whose weights have not."""
    (tmp_path / "config.json").write_text((tiny_llama / "config.json").read_text())
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda model, name: str(tmp_path / name))
    files = {"a.safetensors": SimpleNamespace(tensors={"w": SimpleNamespace(shape=[2, 3], dtype="BF16")})}
    monkeypatch.setattr(
        huggingface_hub, "get_safetensors_metadata", lambda model: SimpleNamespace(files_metadata=files)
    )


def test_headers_come_from_the_hub(hub):
    found = target.find("some/model")
    assert found.config.model_type == "llama"
    assert found.headers.tensors == (TensorHeader("w", (2, 3), "BF16", "a.safetensors"),)
    assert found.headers.nbytes == 12


def test_headers_that_cannot_be_fetched_are_a_note(hub, monkeypatch):
    def fail(model):
        raise ConnectionError("gone")

    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", fail)
    found = target.find("some/model")
    assert found.headers.tensors == ()
    assert "could not be fetched" in found.headers.note


def refusal(kind):
    return kind("no", response=SimpleNamespace(headers={}, status_code=404, request=None))


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (LocalEntryNotFoundError("offline"), "cannot be reached"),
        (ConnectionError("offline"), "cannot be reached"),
        (refusal(RepositoryNotFoundError), "no such repository"),
        (refusal(GatedRepoError), "gated"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_each_refusal_of_the_hub_is_one_sentence(monkeypatch, error, says):
    def fail(model, name):
        raise error

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(ConfigError, match=says):
        target.find("some/model")


@pytest.mark.parametrize(
    ("wanted", "named", "dtype"),
    [
        ("auto", "bfloat16", torch.bfloat16),
        ("auto", "float16", torch.float16),
        ("auto", "float32", torch.bfloat16),
        ("auto", None, torch.bfloat16),
        ("float32", "bfloat16", torch.float32),
        ("half", "bfloat16", torch.float16),
    ],
)
def test_the_dtype(wanted, named, dtype):
    assert target.pick_dtype(wanted, LlamaConfig(dtype=named)) == dtype


@pytest.mark.parametrize(
    ("text", "size"), [("141GB", 141 * 10**9), ("80 gib", 80 * 2**30), ("512", 512), ("1.5TB", 1.5e12)]
)
def test_amounts_of_memory(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "0GB", "1XB", "1 G B"])
def test_what_is_no_amount_of_memory(text):
    with pytest.raises(ConfigError, match="not an amount"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([], ""), ([3], "3"), ([0, 1, 2], "0-2"), ([2, 0, 1, 5], "0-2,5"), ([0, 2, 4, 6], "0,2..6"), ([1, 3], "1,3")],
)
def test_ranges(numbers, text):
    assert ranges(numbers) == text


def test_sizes_in_words():
    assert [bytes_text(n) for n in (12, 269_060_552, 141e9)] == ["12 B", "269.1 MB", "141.0 GB"]
    assert [count_text(n) for n in (999, 134_515_008, 8_030_261_248)] == ["999", "134.5 million", "8.03 billion"]
