import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import tfbackend.cli.serve as serve_module
from tfbackend.cli import app
from tfbackend.cli.serve import check_local_model, parse, run
from tfbackend.errors import CheckpointError, ConfigError, TfbackendError

FLAG_LINES = [
    ["some/model"],
    ["some/model", "--port", "8123", "-tp", "2", "--enforce-eager", "--served-model-name", "a", "b"],
    ["some/model", "--compilation-config.mode", "3", "--compilation-config.cudagraph_mode", "NONE", "-O1"],
    ["some/model", "--headless", "-dp", "4", "--data_parallel_size_local=2"],
    ["--model", "some/model", "--max-model-len", "2k", "--no-enable-prefix-caching"],
]


@pytest.fixture
def seen(monkeypatch):
    """The arguments that `tfbackend serve` hands to vLLM's parser."""
    calls = []
    monkeypatch.setattr(serve_module, "run", calls.append)
    return calls


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)


def vllm_parse(arguments):
    """What `vllm serve` itself makes of `arguments`."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="vllm")
    ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
    return parser.parse_args(["serve", *arguments])


def test_importing_the_command_imports_nothing_heavy():
    code = "import sys, tfbackend.cli; print(sorted({'torch', 'transformers', 'vllm'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


@pytest.mark.parametrize(
    "arguments",
    [
        ["some/model", "-tp", "2", "-O3", "--port=1", "--help"],
        ["--help=ModelConfig"],
        ["some/model", "--", "-x", "--version"],
        ["--unknown", "value", "some/model", "--a.b+", "c,d"],
        [],
    ],
)
def test_every_argument_is_passed_on_untouched_and_in_order(seen, arguments):
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert result.exit_code == 0, result.output
    assert seen == [arguments]


def test_own_help_names_the_command():
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    assert "serve" in result.output


@pytest.mark.parametrize("arguments", FLAG_LINES, ids=" ".join)
def test_flags_mean_what_they_mean_to_vllm(arguments):
    ours, theirs = vars(parse(arguments)), vars(vllm_parse(arguments))
    assert ours.pop("model_impl") == "transformers"
    assert theirs.pop("model_impl") == "auto"
    assert ours == theirs


@pytest.mark.parametrize("flag", [["--model-impl", "vllm"], ["--model-impl=vllm"], ["--model_impl=vllm"]], ids=" ".join)
def test_a_given_model_impl_wins(flag):
    assert parse(["some/model", *flag]).model_impl == "vllm"


def test_a_model_impl_in_a_config_file_wins(tmp_path):
    config = tmp_path / "serve.yaml"
    config.write_text("model-impl: vllm\nport: 8124\n")
    args = parse(["some/model", "--config", str(config)])
    assert (args.model_impl, args.port) == ("vllm", 8124)


def test_the_server_is_started_with_the_parsed_arguments(monkeypatch, model):
    from vllm.entrypoints.cli.serve import ServeSubcommand

    started = []
    monkeypatch.setattr(ServeSubcommand, "cmd", staticmethod(started.append))
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    run([model, "--port", "8125"])
    [args] = started
    assert (args.model_tag, args.port, args.model_impl) == (model, 8125, "transformers")


def test_help_is_vllms_under_our_name(monkeypatch, capsys):
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    monkeypatch.setattr(FlexibleArgumentParser, "_search_keyword", None)
    with pytest.raises(SystemExit) as exit_info:
        run(["--help"])
    assert exit_info.value.code == 0
    printed = capsys.readouterr().out
    assert "usage: tfbackend serve [model_tag] [options]" in printed
    assert "tfbackend serve --help=all" in printed
    assert "ModelConfig" in printed


def test_a_configuration_that_vllm_refuses_is_one_sentence(monkeypatch, model):
    from pydantic import BaseModel, field_validator
    from vllm.entrypoints.cli.serve import ServeSubcommand

    class Config(BaseModel):
        heads: int

        @field_validator("heads")
        @classmethod
        def positive(cls, value):
            raise ValueError("heads must be positive")

    monkeypatch.setattr(ServeSubcommand, "cmd", staticmethod(lambda args: Config(heads=0)))
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    with pytest.raises(ConfigError, match=r"Found: heads must be positive\.$"):
        run([model])


@pytest.mark.parametrize(
    ("raised", "shown", "says"),
    [
        (OSError(98, "Address already in use"), ConfigError, "Address already in use"),
        (RuntimeError("Engine core initialization failed. See root cause above."), TfbackendError, "in the log above"),
        (RuntimeError("something else"), RuntimeError, "something else"),
    ],
    ids=repr,
)
def test_a_failed_start_is_one_sentence_and_other_errors_are_left_alone(monkeypatch, model, raised, shown, says):
    from vllm.entrypoints.cli.serve import ServeSubcommand

    def fail(args):
        raise raised

    monkeypatch.setattr(ServeSubcommand, "cmd", staticmethod(fail))
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    with pytest.raises(shown, match=says):
        run([model])


def test_the_words_that_tell_a_failed_engine_are_vllms():
    import inspect

    from vllm.v1.engine import utils

    assert serve_module.ENGINE_FAILED in inspect.getsource(utils)


def test_without_vllm_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(serve_module.importlib.util, "find_spec", lambda name: None)
    result = CliRunner().invoke(app, ["serve", "some/model"])
    assert result.exit_code == 1
    assert "pip install" in result.stderr
    assert isinstance(result.exception, SystemExit)


def make_missing(folder):
    folder.rmdir()


def make_empty(folder):
    pass


def make_foreign(folder):
    (folder / "notes.txt").write_text("no model")


def make_truncated(folder):
    (folder / "config.json").write_text('{"model_type": "lla')


def make_list(folder):
    (folder / "config.json").write_text("[1, 2]")


def make_binary(folder):
    (folder / "config.json").write_bytes(b"\xff\xfe\x00garbage")


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (make_missing, "no such model folder"),
        (make_empty, "an empty folder"),
        (make_foreign, r"notes\.txt"),
        (make_truncated, r"config\.json cannot be read"),
        (make_list, "a JSON list"),
        (make_binary, r"config\.json cannot be read"),
    ],
)
def test_a_bad_model_folder_is_refused_by_name(tmp_path, break_it, says):
    folder = tmp_path / "model"
    folder.mkdir()
    break_it(folder)
    with pytest.raises(CheckpointError, match=says) as refused:
        check_local_model(str(folder))
    assert str(folder) in str(refused.value)


def test_an_unreadable_folder_is_refused(monkeypatch, model):
    # Faked, because root may read whatever the mode says.
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != model)
    with pytest.raises(CheckpointError, match="cannot be read"):
        check_local_model(model)


def test_a_bad_folder_ends_the_command_with_one_line(tmp_path):
    result = CliRunner().invoke(app, ["serve", str(tmp_path / "absent")])
    assert result.exit_code == 1
    assert [line for line in result.stderr.splitlines() if line.startswith("tfbackend: error: ")]
    assert "Traceback" not in result.output


@pytest.mark.parametrize("name", ["org/model", "gpt2", "s3://bucket/a/model", "org/repo/file.gguf"])
def test_names_that_are_not_paths_are_left_to_vllm(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    check_local_model(name)


def test_a_relative_path_with_several_parts_is_a_path(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="no such model folder"):
        check_local_model("models/mine/v2")


def test_a_config_kept_elsewhere_need_not_be_in_the_folder(tmp_path):
    check_local_model(str(tmp_path), hf_config_path="org/model")
