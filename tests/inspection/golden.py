"""Plans of famous models as text, kept under tests/golden/plans so that a change of plan shows as a diff in review.

python -m tests.inspection.golden            say which differ
python -m tests.inspection.golden --write    write them anew; then read the diff against the modelling source
"""

import io
import re
import sys
from pathlib import Path

from rich.console import Console

from tfbackend.inspection import screen
from tfbackend.inspection.examine import Request, inspect_model
from tfbackend.inspection.facts import class_lines, layout_lines, memory_lines, title_line
from tfbackend.inspection.verdict import WORDS

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
CONFIGS = sorted((GOLDEN / "configs").glob("*.json"))
RANKS = (1, 2)


def plan_text(config, tp):
    """All that inspect says of the plan, without the line numbers of Transformers, which every release moves."""
    found = inspect_model(Request(str(config), tp=tp, gpu=141 * 10**9, budget=120.0))
    console = Console(file=io.StringIO(), width=160, color_system=None, legacy_windows=False)
    console.print(f"{config.stem}, tp {tp}: {WORDS[found.status]}", highlight=False)
    for line in (title_line(found), *class_lines(found), *layout_lines(found), *memory_lines(found)):
        console.print(line, highlight=False)
    console.print()
    sections = (screen.everything_found, screen.module_tree, screen.parallel_layout, screen.forwards)
    screen.print_sections(console, [make(found) for make in sections])
    text = re.sub(r"(modeling_\w+\.py):\d+", r"\1", console.file.getvalue())
    return "\n".join(line.rstrip() for line in text.splitlines()).rstrip() + "\n"


def golden_path(config, tp):
    return GOLDEN / "plans" / f"{config.stem}.tp{tp}.txt"


def main(write):
    differing = 0
    for config in CONFIGS:
        for tp in RANKS:
            path, text = golden_path(config, tp), plan_text(config, tp)
            if path.exists() and path.read_text() == text:
                continue
            differing += 1
            print(("wrote " if write else "differs: ") + path.name)
            if write:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
    return 0 if write else min(differing, 1)


if __name__ == "__main__":
    sys.exit(main("--write" in sys.argv))
