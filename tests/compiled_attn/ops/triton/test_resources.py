"""The kernels compile ahead of time for every device, without spills and with tensor cores."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[4]
SCRIPT = ROOT / "benchmarks" / "triton_resources.py"
SHARED = {"sm_90": 227 * 1024, "gfx942": 64 * 1024}
SHARED_OF_OTHERS = 99 * 1024  # that of sm_89 and sm_120
CASES = [
    "D 64", "D 128", "D 128, window, cap, ALiBi, sinks", "D 128, int8, float16, page 128",
    "D 128, e4m3", "D 192, Dv 128", "D 256", "D 576, Dv 512", "D 128, float32",
    "D 64, float32", "D 256, float32", "D 576, Dv 512, float32", "D 64, int8", "D 64, e4m3",
    "D 256, int8", "D 256, e4m3", "D 576, Dv 512, e4m3", "D 576, Dv 512, group 128",
    "D 576, Dv 512, group 32", "D 1024", "D 1024, e4m3", "D 1024, int8",
]  # fmt: skip
SPILLED = {
    ("D 64, float32", "prefill", "sm_89"): 8,
    ("D 64, int8", "prefill", "gfx942"): 24,
    ("D 64, e4m3", "prefill", "gfx942"): 20,
    ("D 128, e4m3", "prefill", "gfx942"): 56,
    ("D 256", "prefill", "sm_89"): 16,
    ("D 256, float32", "prefill", "sm_120"): 8,
    ("D 1024, e4m3", "decode", "sm_80"): 24,
    ("D 1024, e4m3", "decode", "gfx942"): 88,
    ("D 1024, e4m3", "prefill", "gfx942"): 88,
    ("D 1024, int8", "decode", "gfx942"): 72,
    ("D 1024, int8", "prefill", "gfx942"): 52,
    ("D 128, window, cap, ALiBi, sinks", "decode", "sm_80"): 16,
    ("D 576, Dv 512, e4m3", "decode", "sm_89"): 32,
    ("D 64, float32", "decode", "sm_120"): 24,
    ("D 576, Dv 512, float32", "decode", "sm_100"): 16,
    ("D 576, Dv 512, float32", "decode", "sm_120"): 16,
    ("D 256, int8", "decode", "sm_100"): 24,
    ("D 256, int8", "decode", "sm_120"): 16,
    ("D 256, e4m3", "decode", "sm_120"): 8,
    ("D 64, sinks", "decode", "sm_100"): 8,
    ("D 192, Dv 128", "decode", "sm_100"): 16,
    ("D 192, Dv 128", "decode", "sm_89"): 16,
    ("D 128, e4m3", "decode", "sm_90"): 0,
}  # fmt: skip
"""Bytes of a thread that these spill all the same, a few numbers; others of sm_90: those below."""
SPILLED_OF_HOPPER = {"decode": 700, "prefill": 1200}
"""There tiles are those that were measured to be the fastest."""
TARGETS = ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942"]


TENSOR_CORES = {"sm_80": "HMMA", "sm_89": "HMMA", "sm_90": "HGMMA", "sm_100": "UTCHMMA",
                "sm_120": "HMMA"}  # fmt: skip
"""The matrix instruction of tiles of 64 rows and more; smaller ones use HMMA on all of them."""
PROGRAMS = {
    ("D 64", "sm_80"): 2, ("D 64", "sm_90"): 4, ("D 64", "sm_100"): 4,
    ("D 128", "sm_80"): 2, ("D 128", "sm_90"): 2, ("D 128", "sm_100"): 2,
    ("D 128, e4m3", "sm_80"): 1, ("D 128, e4m3", "sm_90"): 2, ("D 128, e4m3", "sm_100"): 1,
    ("D 256", "sm_90"): 2,
}  # fmt: skip
"""Programs of a decode that a multiprocessor holds at least: one computes while others load."""
COPIED = {("D 192, Dv 128", target): 0.75 for target in ("sm_80", "sm_89", "sm_100", "sm_120")}
"""Share of copies of 16 bytes in cases that have less of them."""
IN_FLIGHT = 24 * 1024
"""Bytes to be loaded at once on each multiprocessor: an H100's bandwidth times a microsecond."""


def _compiled(
    cases: list[str], targets: list[str], kernels: tuple[str, ...] = (), root: Path = ROOT
) -> list[dict[str, Any]]:
    """In a process of its own: in this one kernels may be interpreted."""
    chosen = ["--kernels", *kernels] if kernels else []
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(root)}
    made = subprocess.run(
        [sys.executable, SCRIPT, "--json", "--cases", *cases, "--targets", *targets,
         *chosen],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    return [json.loads(line) for line in made.stdout.splitlines()]


def _expect_fits(row: dict[str, Any]) -> None:
    is_gfx = row["target"] == "gfx942"
    assert row["registers"] <= (512 if is_gfx else 255), row
    usual = SPILLED_OF_HOPPER.get(row["kernel"], 0) if row["target"] == "sm_90" else 0
    spilled = SPILLED.get((row["case"], row["kernel"], row["target"]), usual)
    assert row["spilled"] <= spilled, row
    assert row["shared"] <= SHARED.get(row["target"], SHARED_OF_OTHERS), row
    if row["attends"] and row["dtype"] != "torch.float32":
        assert row["tensor_cores"], row
    assert row["publishes"] == (row["splits"] > 1), row


def _expect_fast(row: dict[str, Any]) -> None:
    """The instructions and the occupancy of NVIDIA's devices that speed depends on."""
    memory, case = row["memory"], (row["case"], row["target"])
    assert bool(row["spilled"]) == any(name[:3] in ("LDL", "STL") for name in memory), row
    if not row["attends"] or row["dtype"] == "torch.float32":
        return
    rows = int(row["tile"].split("x")[0])
    assert row["tensor_cores"] == (TENSOR_CORES[row["target"]] if rows >= 64 else "HMMA"), row
    copied = {int(name.split(".")[1]): n for name, n in memory.items() if name[:6] == "LDGSTS"}
    of_all = sum(bits * count for bits, count in copied.items())
    has_codes = any(codes in row["case"] for codes in ("int8", "e4m3"))
    # Keys and values are copied asynchronously, 16 bytes a thread (codes: 8 or 16); the rest is
    # scales and the block table, and codes of the small tiles of other devices than sm_90.
    wide = sum(bits * count for bits, count in copied.items() if bits >= (64 if has_codes else 128))
    least = COPIED.get(case, 0.9 if row["target"] == "sm_90" or not has_codes else 0.5)
    assert wide > least * of_all > 0, row
    if row["kernel"] == "decode":
        assert row["programs"] >= PROGRAMS.get(case, 1), row
        assert row["programs"] * row["shared"] >= IN_FLIGHT, row


def _expect_no_fused_power(row: dict[str, Any]) -> None:
    """Where the machine code has one, the largest of large scores is far from 0 below itself."""
    assert row["fused_powers"] == 0, row


def test_a_decode_and_a_prefill_fit_a_device():
    rows = _compiled(["D 64, sinks"], ["sm_90"])
    assert {"decode", "prefill", "write"} == {row["kernel"] for row in rows}
    assert {row["kernel"] for row in rows if row["publishes"]} == {"decode"}
    for row in rows:
        _expect_fits(row)
        _expect_no_fused_power(row)
        _expect_fast(row)
    assert {row["tensor_cores"] for row in rows if row["kernel"] == "prefill"} == {"HGMMA"}


@pytest.mark.usefixtures("of_this_triton")
@pytest.mark.parametrize(
    ("case", "target", "kernel"),
    [
        ("D 128", "sm_80", "decode"),
        ("D 128", "sm_100", "prefill"),
        ("D 128, e4m3", "sm_90", "decode"),
    ],
)
def test_devices_copy_asynchronously_and_use_their_tensor_cores(case, target, kernel):
    (row,) = _compiled([case], [target], (kernel,))
    _expect_fits(row)
    _expect_fast(row)


def test_programs_of_a_multiprocessor_are_those_of_its_scarcest_resource():
    from accelerator.resources import programs_per_processor as programs

    assert programs("sm_90", 255, 0, 4) == 2  # by registers
    assert programs("sm_90", 32, 113 * 1024, 4) == 2  # by shared memory, 1 KB of it reserved
    assert programs("sm_90", 32, 114 * 1024, 4) == 1
    assert programs("sm_90", 16, 0, 8) == 8 and programs("sm_89", 16, 0, 8) == 6  # by warps
    assert programs("sm_90", 16, 0, 1) == 32  # by their number


def test_memory_instructions_are_counted_by_their_width():
    from accelerator.resources import _memory

    code = """
        /*0000*/ LDGSTS.E.BYPASS.LTC128B.128 [R1], [R2.64] ;
        /*0010*/ @!P0 LDG.E.U16.CONSTANT R3, [R4.64] ;
        /*0020*/ LDG.E.64.STRONG.GPU R6, [R4.64] ;
        /*0030*/ STL [R1+0x8], R5 ;
        /*0040*/ LDL.LU.64 R5, [R1+0x8] ;
        /*0050*/ LDS.128 R8, [R2] ;
    """
    assert _memory(code) == {
        "LDGSTS.128": 1, "LDG.16": 1, "LDG.64": 1, "STL.32": 1, "LDL.64": 1
    }  # fmt: skip


@pytest.mark.slow  # 20 s of compiling; the quick test looks at bfloat16 with sinks
def test_no_product_is_fused_with_the_subtraction_of_the_maximum():
    for row in _compiled(["D 64, float32", "D 64", "D 64, int8"], ["sm_90"]):
        _expect_no_fused_power(row)


@pytest.mark.slow
@pytest.mark.parametrize("order", ['"relaxed"', '"acquire"', '"release"', '"acq_rel", scope="cta"'])
def test_an_arrival_that_does_not_publish_a_split_is_found(tmp_path, order):
    for package in ("compiled_attn", "graphs"):
        shutil.copytree(ROOT / package, tmp_path / package)
    path = tmp_path / "compiled_attn" / "ops" / "triton" / "attend.py"
    source = path.read_text()
    assert source.count('sem="acq_rel", scope="gpu"') == 1
    path.write_text(source.replace('sem="acq_rel", scope="gpu"', f"sem={order}"))
    assert not any(row["publishes"] for row in _compiled(["D 64, sinks"], ["sm_90"], root=tmp_path))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", CASES)
def test_all_tiles_of_the_chooser_fit_all_devices(case, target):
    for row in _compiled([case], [target]):
        _expect_fits(row)
        if target != "gfx942":
            _expect_fast(row)
