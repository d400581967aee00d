import errno
import json
import os
import signal
import subprocess
import sys

import pytest


@pytest.fixture
def maker(load_script, monkeypatch, tmp_path):
    """scripts/make_checkpoint.py, with a conversion that only writes one file."""
    module = load_script("make_checkpoint")
    monkeypatch.setattr(module, "find_gguf", lambda: tmp_path / "source.gguf")
    monkeypatch.setattr(module, "convert", lambda source, folder: (folder / "model.safetensors").write_text("weights"))
    monkeypatch.setattr(module, "verify", lambda folder, source: None)
    monkeypatch.setattr(module.signal, "signal", lambda *arguments: None)
    return module


@pytest.fixture
def target(tmp_path):
    return tmp_path / "cache" / "model"


def fail_with(error):
    def convert(source, folder):
        (folder / "model.safetensors").write_text("half of the wei")
        raise error

    return convert


def test_a_whole_checkpoint_appears_under_its_name(maker, target):
    assert maker.main([str(target)]) == 0
    assert [path.name for path in target.parent.iterdir()] == [target.name]
    assert (target / "model.safetensors").read_text() == "weights"


def test_a_checkpoint_that_is_there_is_left_alone(maker, target, monkeypatch):
    target.mkdir(parents=True)
    monkeypatch.setattr(maker, "convert", fail_with(AssertionError("made again")))
    assert maker.main([str(target)]) == 0


@pytest.mark.parametrize("step", ["convert", "verify"])
@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("bad tensor"),
        ImportError("no gguf"),
        KeyboardInterrupt(),
    ],
    ids=repr,
)
def test_a_failure_leaves_nothing_and_says_one_sentence(maker, target, monkeypatch, capsys, step, error):
    def fail(*arguments):
        fail_with(error)(None, next(argument for argument in arguments if argument.name.startswith(target.name)))

    monkeypatch.setattr(maker, step, fail)
    assert maker.main([str(target)]) != 0
    assert list(target.parent.iterdir()) == []
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_a_full_disk_reported_by_safetensors_is_caught(maker, target, monkeypatch):
    monkeypatch.setattr(maker, "convert", fail_with(maker.SafetensorError("I/O error: No space left on device")))
    assert maker.main([str(target)]) == 1
    assert list(target.parent.iterdir()) == []


def test_a_nearly_full_disk_is_refused_before_the_work(maker, target, monkeypatch, capsys):
    monkeypatch.setattr(maker, "NEEDED_BYTES", 2**62)
    monkeypatch.setattr(maker, "convert", fail_with(AssertionError("work was done")))
    assert maker.main([str(target)]) == 1
    assert "the disk is full" in capsys.readouterr().err


def test_remains_of_a_killed_run_are_removed_and_those_of_a_live_one_are_not(maker, target):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    alive = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        for process in (dead, alive):
            target.with_name(f"{target.name}.part-{process.pid}").mkdir(parents=True)
        assert maker.main([str(target)]) == 0
        left = sorted(path.name for path in target.parent.iterdir())
        assert left == [target.name, f"{target.name}.part-{alive.pid}"]
    finally:
        alive.communicate(b"\n")


def test_a_missing_package_is_named(load_script, target, capsys, monkeypatch):
    maker = load_script("make_checkpoint")
    monkeypatch.setattr(maker.signal, "signal", lambda *arguments: None)
    monkeypatch.setattr(maker, "PACKAGE", "a_package_that_nobody_has")
    assert maker.main([str(target)]) == 1
    assert "a_package_that_nobody_has is not installed" in capsys.readouterr().err
    assert not target.exists()


def test_a_terminated_run_cleans_up(load_script, target, tmp_path):
    script = load_script("make_checkpoint").__file__
    code = (
        "import importlib.util as u, pathlib, sys, time\n"
        f"spec = u.spec_from_file_location('maker', {script!r}); m = u.module_from_spec(spec)\n"
        "spec.loader.exec_module(m)\n"
        "m.find_gguf = lambda: pathlib.Path('x')\n"
        "m.convert = lambda source, folder: (print('working', flush=True), time.sleep(60))\n"
        f"sys.exit(m.main([{str(target)!r}]))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while process.stdout.readline().strip() != "working":
        pass
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(20) == 130
    assert list(target.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [("num_hidden_layers", 29), ("rms_norm_eps", 9.999999747378752e-06), ("tie_word_embeddings", False)],
)
def test_a_config_with_another_value_is_refused(load_script, key, value):
    maker = load_script("make_checkpoint")
    maker.check_config(maker.EXPECTED_CONFIG)
    with pytest.raises(maker.CheckpointFailure, match=key):
        maker.check_config({**maker.EXPECTED_CONFIG, key: value})


def test_a_config_that_still_speaks_of_quantization_is_refused(load_script):
    maker = load_script("make_checkpoint")
    with pytest.raises(maker.CheckpointFailure, match="quantized"):
        maker.check_config({**maker.EXPECTED_CONFIG, "quantization_config": {}})


@pytest.fixture
def real(load_script):
    """The folder that `make demo` serves; `make test` makes it first."""
    folder = load_script("make_checkpoint").TARGET
    if not folder.exists():
        pytest.skip("run `make checkpoint` first")
    return folder


def test_the_real_checkpoint_is_bf16_tied_and_has_its_own_template(real):
    from safetensors import safe_open

    with safe_open(real / "model.safetensors", "pt") as tensors:
        names = list(tensors.keys())
        dtypes = {tensors.get_slice(name).get_dtype() for name in names}
    assert dtypes == {"BF16"}
    assert len(names) == 272
    assert "lm_head.weight" not in names
    assert "quantization_config" not in json.loads((real / "config.json").read_text())
    assert "named SmolLM, trained by Hugging Face" in (real / "chat_template.jinja").read_text()


def test_the_real_tokenizer_takes_numbers_apart(real):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(real)
    # As llama.cpp's own reading of the same file gives them: two spaces are one token, and each digit is one.
    assert tokenizer.encode("x  12 and   345abc6") == [104, 256, 33, 34, 284, 333, 35, 36, 37, 25276, 38]
