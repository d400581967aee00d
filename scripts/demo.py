"""`make demo`: serves a small chat model on loopback, asks it one question, and shows what tfbackend did to the model.

PORT=... in the environment picks the port; a free one is taken otherwise. The server and all its processes are gone
when this returns, however it returns. The exit status is 0 only if the model answered rightly and the plan was shown.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / ".cache" / "smollm2-135m-instruct"
LOG = ROOT / ".cache" / "demo-server.log"
HOST = "127.0.0.1"
QUESTION = "What is the capital of France?"
EXPECTED = "Paris"
START_TIMEOUT_S = 420.0  # half a minute on an idle machine; several on one whose cores are all taken
ANSWER_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 15.0
LOG_LINES_SHOWN = 15
REPORT_LINE = re.compile(r"report: (?P<path>\S.*?)\s*$", re.MULTILINE)
# What the server's log says, latest stage first, and what it means to somebody who waits.
STAGES = (
    ("init engine", "opening the port"),
    ("Loading weights took", "preparing the cache"),
    ("Starting to load model", "building the model and loading its weights"),
    ("Initializing a V1 LLM engine", "starting the worker"),
    ("Resolved architecture", "starting the engine"),
    ("", "importing vLLM"),
)
# Loopback is reached directly, whatever proxy the environment names.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class DemoFailure(Exception):
    """What stopped the demo, as one sentence."""


def main() -> int:
    """Returns the exit status."""
    console = Console(highlight=False)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    started = time.monotonic()
    try:
        run(console)
    except DemoFailure as failure:
        print(f"demo failed: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo interrupted; the server has been stopped.", file=sys.stderr)
        return 130
    console.print(f"[dim]demo: done in {time.monotonic() - started:.0f} s, server stopped[/dim]")
    return 0


def run(console: Console) -> None:
    """Raises DemoFailure: the port is taken, the server does not start, the answer is wrong, or there is no plan."""
    if not (MODEL / "config.json").is_file():
        raise DemoFailure(f"there is no checkpoint in {MODEL}; run `make demo`, which makes it.")
    port = choose_port(os.environ.get("PORT"))
    console.print(f"[bold]tfbackend serve {MODEL.name}[/bold] on http://{HOST}:{port}")
    with server(serve_command(port), LOG) as process:
        wait_until_ready(process, f"http://{HOST}:{port}/health", LOG, console)
        answer = ask(f"http://{HOST}:{port}/v1/chat/completions", QUESTION)
        report = find_report(LOG.read_text(errors="replace"))
    console.print(f"[bold cyan]question[/bold cyan] {QUESTION}")
    console.print("[bold cyan]answer  [/bold cyan]", end=" ")
    console.print(answer, markup=False, soft_wrap=True)
    if report is None:
        raise DemoFailure(
            f"the model answered, but the server's log ({LOG}) names no `report:` file, so tfbackend did not serve it"
            " and there is no plan to show."
        )
    console.print("[bold cyan]plan[/bold cyan]")
    console.print(report.read_text(), markup=False, soft_wrap=True)
    if EXPECTED not in answer:
        raise DemoFailure(f"the answer should have said {EXPECTED}.")


def choose_port(wanted: str | None) -> int:
    """A TCP port on loopback that is free now: `wanted`, or any.

    Raises:
        DemoFailure: `wanted` is no port, or something listens on it.
    """
    if wanted and not (wanted.isdecimal() and 1024 <= int(wanted) <= 65535):
        raise DemoFailure(f"PORT={wanted} is not a port number from 1024 to 65535.")
    with socket.socket() as probe:
        # As the server does: a port in TIME_WAIT after an earlier demo is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, int(wanted or 0)))
            probe.listen()
        except OSError as error:
            reason = f"port {wanted} is taken ({error.strerror}); choose another, or leave PORT out."
            raise DemoFailure(reason) from error
        return int(probe.getsockname()[1])


def serve_command(port: int) -> list[str]:
    tfbackend = Path(sys.executable).with_name("tfbackend")
    flags = {"--host": HOST, "--port": str(port), "--dtype": "bfloat16", "--max-model-len": "2048"}
    flags["--served-model-name"] = MODEL.name
    # One short answer does not repay half a minute of compilation.
    return [str(tfbackend), "serve", str(MODEL), "--enforce-eager", *(part for flag in flags.items() for part in flag)]


def server_environment(environment: Mapping[str, str]) -> dict[str, str]:
    defaults = {
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "NO_COLOR": "1",
    }
    return {**defaults, **environment}


@contextlib.contextmanager
def server(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Runs `command` in a process group of its own, its output in `log`, and ends the whole group on the way out."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=server_environment(os.environ),
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
    try:
        yield process
    finally:
        stop(process)


def _end_with_parent() -> None:
    """Has the kernel end the server if the demo is killed outright. Linux only, as vLLM is."""
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Asks the server to stop, waits, and then kills what is left of its process group."""
    try:
        for request in (signal.SIGINT, signal.SIGTERM):
            if process.poll() is None:
                process.send_signal(request)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_TIMEOUT_S)
    finally:
        # Also after a clean exit, and when a second Ctrl-C cuts the waiting short: workers may outlive their parent.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path, console: Console) -> None:
    """Returns when `url` answers.

    Raises:
        DemoFailure: the server ended, or START_TIMEOUT_S passed.
    """
    started = time.monotonic()
    if not console.is_terminal:
        console.print("waiting for the server (about half a minute)")
    with console.status("starting") as status:
        while not answers(url):
            waited = time.monotonic() - started
            if process.poll() is not None:
                raise DemoFailure(f"the server ended with status {process.returncode}.{tail(log)}")
            if waited > START_TIMEOUT_S:
                raise DemoFailure(f"the server was not ready after {START_TIMEOUT_S:.0f} s.{tail(log)}")
            status.update(f"{stage(log.read_text(errors='replace'))} [dim]({waited:.0f} s)[/dim]")
            time.sleep(0.25)
    console.print(f"[dim]ready after {time.monotonic() - started:.0f} s[/dim]")


def answers(url: str) -> bool:
    try:
        with _opener.open(url, timeout=5) as response:
            return bool(response.status == 200)
    except OSError:  # URLError included: nothing listens yet
        return False


def stage(log: str) -> str:
    return next(meaning for marker, meaning in STAGES if marker in log)


def tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:]
    return " The end of its log:\n" + "\n".join(f"    {line}" for line in lines)


def ask(url: str, question: str) -> str:
    """The model's answer to `question`, at temperature 0.

    Raises:
        DemoFailure: the server refused the request, or gave no answer within ANSWER_TIMEOUT_S.
    """
    messages = [{"role": "user", "content": question}]
    body = {"model": MODEL.name, "messages": messages, "temperature": 0, "max_tokens": 64}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, data=json.dumps(body).encode(), headers=headers)
    try:
        with _opener.open(request, timeout=ANSWER_TIMEOUT_S) as response:
            reply: Any = json.load(response)
    except urllib.error.HTTPError as error:
        reason = error.read().decode(errors="replace")
        raise DemoFailure(f"the server refused the question: {error.code} {reason}") from error
    except OSError as error:
        raise DemoFailure(f"the server did not answer: {error}.{tail(LOG)}") from error
    return str(reply["choices"][0]["message"]["content"]).strip()


def find_report(log: str) -> Path | None:
    """The file that the server's log names as tfbackend's report, if it does and the file is there."""
    named = [Path(match["path"]) for match in REPORT_LINE.finditer(log)]
    return next((path for path in reversed(named) if path.is_file()), None)


if __name__ == "__main__":
    sys.exit(main())
