"""The command line of verify: what it refuses, and how it says so."""

import json

import pytest
from typer.testing import CliRunner

from tfbackend.cli import app

runner = CliRunner()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["./nowhere"], "There is no such folder or file"),
        (["./nowhere", "--quick", "--full"], "Both --quick and --full are given"),
    ],
)
def test_what_cannot_be_told(arguments: list[str], words: str) -> None:
    plain = runner.invoke(app, ["verify", *arguments])
    assert plain.exit_code == 2
    assert words in plain.output
    made = runner.invoke(app, ["verify", *arguments, "--json"])
    assert made.exit_code == 2
    document = json.loads(made.stdout)
    assert (document["schema"], document["verdict"], document["rungs"]) == (1, "cannot tell", [])
    assert words in document["error"]
