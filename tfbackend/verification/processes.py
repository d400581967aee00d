"""A process that has done the slow imports and forks a child for each call, so that a call costs no import.

The parent computes nothing: a process that forks after its OpenMP threads have started deadlocks in the child, and one
that has loaded vLLM's plugins hands them on. Each child is the leader of its own process group and is killed with all
it started when it takes too long. What it printed goes to a log, whose end is part of the outcome.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOG_LINES = 25


@dataclass(frozen=True)
class Outcome:
    """What became of a call: its value, or an error in words with the end of its log."""

    value: Any
    error: str
    log: str
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether the call returned."""
        return not self.error

    def tail(self, lines: int = LOG_LINES) -> str:
        """The last lines of the child's log."""
        return "\n".join(self.log.splitlines()[-lines:])


class WarmProcess:
    """The client's end: starts the warm process, sends calls, stops it.

    Args:
        imports: modules to import once.
        env: what the process runs under, beside the environment of this one.
        cwd: where it runs, and so what else can be imported there.
    """

    def __init__(self, imports: Sequence[str], env: Mapping[str, str], cwd: Path | None = None) -> None:
        self._imports, self._env, self._cwd = imports, env, cwd
        self._process: subprocess.Popen[bytes] | None = None
        self._noise: Any = None

    def call(
        self, function: Callable[..., Any], *args: Any, env: Mapping[str, str] | None = None, timeout: float = 120
    ) -> Outcome:
        """Run `function(*args)`, importable by name, in a fresh fork with `env` set, for `timeout` seconds at most.

        Never raises for the child, nor for a warm process that cannot start: both are outcomes.
        """
        if self._process is None or self._process.poll() is not None:
            self._start()
        process = self._process
        assert process is not None and process.stdin and process.stdout
        try:
            _send(process.stdin.fileno(), (function.__module__, function.__qualname__, args, dict(env or {}), timeout))
            outcome: Outcome = _receive(process.stdout.fileno())
        except (EOFError, BrokenPipeError):
            log = Path(self._noise.name).read_text(errors="replace")
            status = process.wait(timeout=30)
            return Outcome(None, f"the process that starts others died, exit status {status}", log, 0.0)
        return outcome

    def stop(self) -> None:
        """End the warm process."""
        if self._process is not None:
            assert self._process.stdin and self._process.stdout
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            self._process.wait(timeout=30)
            self._process.stdout.close()
            self._noise.close()
            self._process = None

    def _start(self) -> None:
        self._noise = tempfile.NamedTemporaryFile(suffix=".log")  # noqa: SIM115 - as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tfbackend.verification.processes", *self._imports],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._noise,
            env=os.environ | self._env,
            cwd=self._cwd,
        )


def _send(fd: int, message: Any) -> None:
    data = pickle.dumps(message)
    view = memoryview(struct.pack("<Q", len(data)) + data)
    while view:
        view = view[os.write(fd, view) :]


def _read(fd: int, size: int) -> bytes:
    parts = []
    while size:
        part = os.read(fd, min(size, 1 << 20))
        if not part:
            raise EOFError("the other end is gone")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _receive(fd: int) -> Any:
    return pickle.loads(_read(fd, struct.unpack("<Q", _read(fd, 8))[0]))


def serve_calls(imports: list[str]) -> None:
    """The warm process: import, then answer calls until the client closes the pipe."""
    calls, answers = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # prints must not end up among the answers
    for name in imports:
        importlib.import_module(name)
    gc.freeze()  # a collection in a child would walk, and so copy, all that the imports have made
    while True:
        try:
            call = _receive(calls)
        except EOFError:
            return
        _send(answers, _run(call, calls))


def _run(call: tuple[str, str, tuple[Any, ...], dict[str, str], float], calls: int) -> Outcome:
    """Fork, wait for the answer, the end of the child, the time limit or the end of the client."""
    module, name, args, env, timeout = call
    plugins = sys.modules.get("vllm.plugins")
    assert plugins is None or not plugins.plugins_loaded, "the warm process has loaded vLLM's plugins"
    start = time.monotonic()
    with tempfile.NamedTemporaryFile(suffix=".log") as log:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            os.setpgid(0, 0)
            _child(module, name, args, env, writing, log.name)
        os.close(writing)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.setpgid(pid, pid)  # here too: the child may be killed before it has run
        try:
            ready, _, _ = select.select([reading, calls], [], [], timeout)
            value, error = _answer(reading) if reading in ready else (None, f"no answer within {timeout:.0f} s")
        finally:
            _kill_group(pid)
            _, status = os.waitpid(pid, 0)
            os.close(reading)
        if error == "died":
            error = f"the child died, {_describe(status)}"
        text = Path(log.name).read_text(errors="replace")
    return Outcome(value, error, text, time.monotonic() - start)


def _answer(reading: int) -> tuple[Any, str]:
    try:
        answer: tuple[Any, str] = _receive(reading)
    except EOFError:
        return None, "died"
    return answer


def _describe(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"signal {signal.Signals(os.WTERMSIG(status)).name}"
    return f"exit status {os.WEXITSTATUS(status)}"


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it is gone with all it started
        os.killpg(pid, signal.SIGKILL)


def _child(module: str, name: str, args: tuple[Any, ...], env: dict[str, str], writing: int, log: str) -> None:
    """The forked child: never returns."""
    code = 1
    try:
        fd = os.open(log, os.O_WRONLY | os.O_APPEND)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        os.environ.update(env)
        try:
            reply = getattr(importlib.import_module(module), name)(*args), ""
        except Exception as error:  # noqa: BLE001 - the client decides what an error means
            traceback.print_exc()
            reply = None, f"{type(error).__name__}: {error}"
        sys.stdout.flush()
        sys.stderr.flush()
        _send(writing, reply)
        code = 0
    except BaseException:  # noqa: BLE001 - an exit, or an answer that cannot travel: the log must say so
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


if __name__ == "__main__":
    from tfbackend.verification import processes  # under its real name, or the client could not unpickle its answers

    processes.serve_calls(sys.argv[1:])
