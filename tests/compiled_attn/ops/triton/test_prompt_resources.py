"""The kernel for prompts compiles ahead of time, with bulk copies and without spills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[4]
SCRIPT = ROOT / "benchmarks" / "prompt_resources.py"
SHARED = {"sm_90": 227 * 1024, "sm_100": 227 * 1024, "sm_120": 99 * 1024}
MATRIX = {"sm_90": "HGMMA", "sm_100": "UTCHMMA", "sm_120": "HMMA"}


def _compiled(target: str, cases: list[str]) -> list[dict[str, Any]]:
    """In a process of its own: in this one kernels may be interpreted."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    made = subprocess.run(
        [sys.executable, SCRIPT, "--json", "--cases", *cases, "--targets", target],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    return [json.loads(line) for line in made.stdout.splitlines()]


def _expect_fast_code(row: dict[str, Any]) -> None:
    assert row["tensor_cores"] == MATRIX[row["target"]], row
    assert row["bulk"] >= 3, row  # queries, keys, values
    assert row["shared"] <= SHARED[row["target"]], row
    assert row["fused_powers"] == 0, row


@pytest.mark.usefixtures("of_this_triton")
def test_warps_are_specialised_on_hopper():
    """One loop: a group of warps copies, two multiply, with registers for each."""
    rows = {row["kernel"]: row for row in _compiled("sm_90", ["D 128, page 128"])}
    assert rows.keys() == {"pipelined", "specialized", "repair"}
    for row in rows.values():
        _expect_fast_code(row)
        assert row["spilled"] == 0
    assert rows["specialized"]["limits"] >= 3 and rows["pipelined"]["limits"] == 0
    assert rows["specialized"]["registers"] == 168  # of each warp before they pass some on


SPILLED = {("D 256, page 64", "sm_90"): 400, ("D 256, page 64", "sm_100"): 400}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
@pytest.mark.parametrize(
    "case",
    ["D 64, page 128", "D 128, page 64", "D 128, page 16", "D 128, group 1, float16",
     "D 256, page 64"],
)  # fmt: skip
def test_tiles_of_devices_with_matrix_units_fit(case, target):
    for row in _compiled(target, [case]):
        _expect_fast_code(row)
        assert row["spilled"] <= SPILLED.get((case, target), 0), row


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", ["D 64", "D 128"])
def test_tiles_of_devices_with_little_shared_memory_fit(case):
    for row in _compiled("sm_120", [f"{case}, page 64, 99 KB"]):
        _expect_fast_code(row)
        assert row["spilled"] <= 64, row
