"""What every test runs under: the repository root importable, no network, no cache but the tests' own."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the helpers are imported as tests.serve.*

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["COLUMNS"] = "100"  # what the width of a terminal decides is the same wherever the tests run
