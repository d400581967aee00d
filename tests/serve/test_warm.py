"""A child that raises, dies, hangs or leaves something running gives an outcome in words."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serve import children
from tests.serve.warm import WarmProcess


@pytest.fixture(scope="module")
def warm() -> Iterator[WarmProcess]:
    process = WarmProcess((), {})
    yield process
    process.stop()


def test_value_log_and_environment(warm: WarmProcess) -> None:
    outcome = warm.call(children.answer, 41, env={"TFBACKEND_TEST_CHILD": "here"})
    assert outcome.ok
    assert outcome.value == (42, "here")
    assert outcome.log == "computing\n"
    assert warm.call(children.answer, 1).value == (2, "")


def test_exception(warm: WarmProcess) -> None:
    outcome = warm.call(children.fail)
    assert outcome.error == "ValueError: no such thing"
    assert "about to fail" in outcome.tail()
    assert "Traceback" in outcome.tail()


def test_signal_and_exit(warm: WarmProcess) -> None:
    assert warm.call(children.die).error == "the child died, signal SIGSEGV"
    outcome = warm.call(children.leave)
    assert outcome.error == "the child died, exit status 1"
    assert "SystemExit: 3" in outcome.log


def test_answer_that_cannot_travel(warm: WarmProcess) -> None:
    outcome = warm.call(children.unpicklable)
    assert outcome.error.startswith("the child died")
    assert "pickle" in outcome.log


def test_hang_is_ended_with_all_it_started(warm: WarmProcess, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    start = time.monotonic()
    outcome = warm.call(children.hang, str(pid_file), timeout=2)
    assert time.monotonic() - start < 10
    assert outcome.error == "no answer within 2 s"
    assert outcome.log == "hanging\n"
    _assert_gone(int(pid_file.read_text()))


def _assert_gone(pid: int) -> None:
    """A killed grandchild may linger as a zombie until init collects it."""
    for _ in range(100):
        status = Path(f"/proc/{pid}/status")
        if not status.exists() or "State:\tZ" in status.read_text():
            return
        time.sleep(0.05)
    raise AssertionError(f"process {pid} is still running")
