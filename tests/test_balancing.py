"""Experts with copies on two ranks: what each rank holds, before and after vLLM's load balancing has moved them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.balancing_rank import COPIES, EXPERTS, LAYERS

SLOTS = EXPERTS + COPIES


def slots(experts, rank, layer):
    """The experts of a rank's half of the slots, as their weights are numbered."""
    return [expert + 100 * layer for expert in experts[rank * SLOTS // 2 : (rank + 1) * SLOTS // 2]]


def test_two_ranks(tmp_path):
    root = Path(__file__).resolve().parents[1]
    command = [sys.executable, "-m", "tests.balancing_rank"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "meet")],
            cwd=root,
            env=os.environ | {"VLLM_DIST_IDENT": tmp_path.name},
            stdout=subprocess.PIPE,
            stderr=(tmp_path / f"{rank}.log").open("w"),
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=280)[0] for process in ranks]
    for rank, output in enumerate(outputs):
        assert ranks[rank].returncode == 0, (tmp_path / f"{rank}.log").read_text()[-3000:]
        found = json.loads(output.splitlines()[-1])
        for layer in range(LAYERS):
            assert found["before"][layer] == [slots(found["first"], rank, layer)] * 2
            assert found["after"][layer] == [slots(found["moved"][layer], rank, layer)] * 2
        assert {name: found[name] for name in ("moe_layers", "logical_experts", "routed_experts")} == {
            "moe_layers": LAYERS,
            "logical_experts": EXPERTS,
            "routed_experts": EXPERTS,
        }
        assert (found["physical_experts"], found["local_physical_experts"]) == (SLOTS, SLOTS // 2)
        assert found["redundant_experts"] == COPIES
