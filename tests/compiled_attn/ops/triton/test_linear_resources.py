"""Layers of 4 to 8 bits compile for every device: no spills, tensor cores, wide loads."""

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
SCRIPT = ROOT / "benchmarks" / "linear_resources.py"
SHARED = {"gfx942": 64 * 1024}
SHARED_OF_OTHERS = 99 * 1024  # that of sm_89 and sm_120, so that no device needs its own tiles
CASES = [
    "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "AWQ", "int8 by row", "Q4_0, int8 inputs",
    "Q6_K, int8 inputs", "Q8_0, int8 inputs", "Q4_K, float16", "Q5_K, float32, int8 inputs",
]  # fmt: skip
TARGETS = ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942"]


def _compiled(*options: str) -> list[dict[str, Any]]:
    """In a process of its own: in this one kernels may be interpreted."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    made = subprocess.run(
        [sys.executable, SCRIPT, "--json", *options],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    return [json.loads(line) for line in made.stdout.splitlines()]


def _expect_fits(row: dict[str, Any]) -> None:
    is_nvidia, is_product = row["target"].startswith("sm"), row["kernel"] != "look-up"
    assert row["spilled"] == 0, row
    assert row["registers"] <= (255 if is_nvidia else 512), row
    assert row["shared"] <= SHARED.get(row["target"], SHARED_OF_OTHERS), row
    if is_nvidia and is_product:  # codes and inputs: copied 16 bytes a thread, while others compute
        assert row["memory"].get("LDGSTS.128", 0) >= 4, row
    is_small = row["kernel"] == "8 rows" and not is_nvidia  # AMD's products have 16 at least
    if is_product and "float32" not in row["case"] and not is_small:
        assert row["tensor_cores"], row


def test_a_decode_and_a_prompt_fit_a_device():
    rows = _compiled("--cases", "Q4_0", "--targets", "sm_90", "--kernels", "8 rows", "512 rows")
    assert [row["tensor_cores"] for row in rows] == ["HMMA", "HGMMA"]
    # In each of four stages a thread copies 32 bytes of codes, for both halves, and 64 of inputs.
    assert rows[0]["memory"]["LDGSTS.128"] == 4 * (2 + 4)
    for row in rows:
        _expect_fits(row)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", CASES)
def test_all_tiles_fit_all_devices(case, target):
    for row in _compiled("--cases", case, "--targets", target):
        _expect_fits(row)
