"""Changed kernels of quantised layers that the cases must find."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.compiled_attn.ops.quantised_layers import arguments, quantised_layer
from tests.compiled_attn.ops.triton.linear_cases import Case, assert_right
from tests.slow import slow_but

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the device")

FLOAT, HALF = torch.float32, torch.float16
DECODE, PROMPT = Case(dtype=FLOAT), Case(rows=40, dtype=FLOAT, biased=True)
ROUNDED = Case(rows=3, dtype=FLOAT, int8_inputs=True)


def of(form: str, **changes: Any) -> Case:
    return Case(form, 5, 32, 512, FLOAT, **changes)


MUTANTS: dict[str, tuple[str, str, Case]] = {
    "order of bytes": ("input % 2 * 2 + input // 2", "input", DECODE),
    "nibbles of the upper half": ("byte + 4 * HALF, 16)", "byte, 16)", DECODE),
    "words of the upper half": ("64 * HALF if BITS == 8", "0 * HALF if BITS == 8", of("Q8_0")),
    "fifth bit of a quad": ("byte + 4 * HALF + quad, 20)", "byte + 4 * HALF, 20)", of("Q5_K")),
    "fifth bit of a half": ("byte + 4 * HALF + quad, 20)", "byte + quad, 20)", of("Q5_K")),
    "sixth bits of a quad": ("byte + 2 * quad, 20)", "byte, 20)", of("Q6_K")),
    "sixth bits of a half": ("64 + 16 * HALF if BITS == 6", "64 if BITS == 6", of("Q6_K")),
    "panel of codes": ("(panel * BLOCKS + block) * (16", "(0 * BLOCKS + block) * (16", DECODE),
    "group of 16 inputs": ("2 * block + HALF", "2 * block", of("Q6_K")),
    "group of several blocks": ("block // OF_GROUP", "block * 0", of("AWQ")),
    "panel of groups": ("panel * (BLOCKS // OF_GROUP)", "panel * 0", DECODE),
    "part of scales": ("16 * PART\n", "16 * 0\n", of("Q4_1")),
    "zero point": ("is_inside, 0, 1, HALF, BLOCKS, STEP_BLOCKS)\n    if KIND == \"factor\"",
                   "is_inside, 0, 1, HALF, BLOCKS, STEP_BLOCKS) + 1\n    if KIND == \"factor\"",
                   of("AWQ")),
    "middle of codes": ("2 ** (BITS - 1)", "2 ** (BITS - 1) - 1", DECODE),
    "factor of the scale": ("    if KIND == \"factor\":", "    if False:", of("Q6_K")),
    "factor of the minimum": ("minimum *= _of", "_unused = _of", of("Q4_K")),
    "scale of the minimum": ("(minimum + 128.0 * scale)", "(128.0 * scale)", of("Q4_1")),
    "rounding of inputs": ("if INT8_INPUTS:", "if False:", ROUNDED),
    "scale of rounded inputs": ("tl.max(tl.abs(upper), 1))", "tl.max(tl.abs(lower), 1))", ROUNDED),
    "the upper half": ("column[:, None] + 16,", "column[:, None],", DECODE),
    "blocks of a tile": ("index // 16 * 32", "index // 16 * 16", DECODE),
    "blocks of the next tile": ("block = (first +", "block = (0 * first +", PROMPT),
    "inputs of the next tile": ("column = first * 32 +", "column = first * 16 +", PROMPT),
    "blocks after the last": ("is_inside & (block < BLOCKS)", "is_inside",
                              Case("int8 by row", 5, 32, 96, FLOAT)),
    "slices": ("[1, 0, 3, 2, 4]", "[1, 0, 2, 3, 4]", DECODE),
    "order of a tile": ("[0, 3, 1, 2, 4]", "[0, 3, 2, 1, 4]", PROMPT),
    "sum of slices": ("tl.sum(sums, 0)", "tl.max(sums, 0)", DECODE),
    "bias": ("tl.load(bias + output", "tl.load(bias + 0 * output", PROMPT),
    "row of the input": ("row.to(tl.int64)[None, :] * input_row", "row[None, :] * 0", PROMPT),
    "rows of a tile": ("tl.program_id(1) * ROWS + tl", "0 * ROWS + tl", PROMPT),
    "outputs of a panel": ("(PANELS * 16) + tl", "16 + tl", Case(rows=40, outputs=144)),
    "rounding to float16": ("weights = weights.to(DTYPE)\n",
                            "weights = weights.to(tl.float8e5).to(DTYPE)\n",
                            Case(dtype=HALF)),
}  # fmt: skip
ROWS = {
    "row of a panel": ("== id % 16)", "== 0 * id)"),
    "panel of a row": ("tl.int64) + id // 16", "tl.int64) + id // 32"),
    "a row out of range": ("(id >= 0) & (id < panels * 16)", "(id >= 0)"),
    "a negative row": ("(id >= 0) & (id < panels * 16)", "(id < panels * 16)"),
    "inputs of a half": ("32 + 16 * HALF + input", "32 + 8 * HALF + input"),
    "rows of other programs": ("tl.program_id(1) * AT_ONCE", "0 * AT_ONCE"),
}
QUICK = ("order of bytes", "zero point", "rounding of inputs", "order of a tile")


def _kernels(room: Path) -> Any:
    importlib.invalidate_caches()
    return importlib.import_module(f"{room.name}.linear_launch")


def _change(room: Path, text: str, changed: str) -> None:
    path = room / "linear.py"
    source = path.read_text()
    assert source.count(text) == 1
    path.write_text(source.replace(text, changed))


def _passes(room: Path, case: Case) -> bool:
    try:
        made = [_before_nan(each) for each in case.made()[0]]
        assert_right(_kernels(room).quantised_linear(*made), case)
    except AssertionError:
        return False
    return True


def _before_nan(argument: object) -> object:
    """A tensor of numbers with NaN after its end, where a read is then seen; others as they are."""
    if not isinstance(argument, torch.Tensor) or not argument.is_floating_point():
        return argument
    memory = torch.full((argument.numel() + 4096,), torch.nan, dtype=argument.dtype)
    memory[: argument.numel()] = argument.flatten()
    return memory[: argument.numel()].view(argument.shape)


def _looks_up(room: Path) -> bool:
    weight, exact = quantised_layer("Q4_0", 48, 768)
    rows = _kernels(room).quantised_rows(
        *arguments(weight), torch.tensor([21, 5, 47, 48, -1]), False
    )
    found = torch.allclose(rows[:3].double(), exact[[21, 5, 47]], atol=1e-5)
    return found and bool(rows[3:].isnan().all())


@pytest.mark.parametrize("name", slow_but(QUICK, MUTANTS))
def test_a_changed_kernel_is_found(room, name):
    text, changed, case = MUTANTS[name]
    _change(room, text, changed)
    assert not _passes(room, case)


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_a_changed_look_up_is_found(room, name):
    _change(room, *ROWS[name])
    assert not _looks_up(room)


@pytest.mark.slow
def test_the_kernels_as_they_are_pass(room):
    assert _looks_up(room)
    cases = {id(case): case for *_, case in MUTANTS.values()}
    assert all(_passes(room, case) for case in cases.values())
