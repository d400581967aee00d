"""What the tests of warm.py run in a child. Apart, because the child imports a function by its module's name."""

import os
import signal
import subprocess
import sys
from pathlib import Path


def answer(value: int) -> tuple[int, str]:
    print("computing")
    return value + 1, os.environ.get("TFBACKEND_TEST_CHILD", "")


def fail() -> None:
    print("about to fail", file=sys.stderr)
    raise ValueError("no such thing")


def die() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def leave() -> None:
    sys.exit(3)


def hang(pid_file: str) -> None:
    child = subprocess.Popen(["sleep", "600"])
    Path(pid_file).write_text(str(child.pid))
    print("hanging", flush=True)
    child.wait()


def unpicklable() -> object:
    return lambda: None
