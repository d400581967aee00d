"""The plans of famous models, as text. See golden.py for how to write them anew."""

import pytest

from tests.inspection.golden import CONFIGS, RANKS, golden_path, plan_text


@pytest.mark.parametrize("tp", RANKS)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_the_plan_is_the_kept_one(config, tp):
    path = golden_path(config, tp)
    assert path.exists(), f"{path.name} is not there: python -m tests.inspection.golden --write"
    kept, now = path.read_text(), plan_text(config, tp)
    assert now == kept, "the plan changed; python -m tests.inspection.golden --write, then read the diff"


def test_none_is_left_over():
    wanted = {golden_path(config, tp) for config in CONFIGS for tp in RANKS}
    assert set(next(iter(wanted)).parent.glob("*")) == wanted
