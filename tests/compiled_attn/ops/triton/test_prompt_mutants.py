"""Changed kernels for prompts that the cases must find, as in `test_mutants`."""

from __future__ import annotations

import importlib
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.compiled_attn.ops.native_scene import FLOAT_TOLERANCE, Scene, dense, scene
from tests.compiled_attn.ops.triton import test_mutants, test_prompt
from tests.slow import slow_but

pytestmark = test_mutants.pytestmark

BF16 = torch.bfloat16
MANY = [(20, 50), (1, 33), (33, 33), (2, 17)]
PAGES: dict[str, Any] = {"requests": MANY, "size": 16, "dtype": BF16, "padding": 1}
LARGE: dict[str, Any] = {**PAGES, "size": 32}
NEW: dict[str, Any] = {**PAGES, "size": 4}
SINKS: dict[str, Any] = {**PAGES, "sinks": torch.tensor([0.3, 3.0, -2.0, 0.0])}
POISONED: dict[str, Any] = {**PAGES, "padding": 0, "seed": 40}  # a value that some rows see

MUTANTS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "causal edge": ("prompt", "<= last[:, None]", "< last[:, None]", PAGES),
    "causal offset": ("prompt", "length - count + own", "length - count + own + 1", PAGES),
    "tiles before the diagonal": ("prompt", "+ first + 1, key_end", "+ first + QUERIES, key_end",
                                  PAGES),
    "end of the keys": ("prompt", "+ first + QUERIES, key_end", "+ first + 1, key_end", PAGES),
    "page": ("prompt", "table + start // PAGE", "table", PAGES),
    "slot": ("prompt", "PAGE), start % PAGE", "PAGE), 0", LARGE),
    "first new token": ("prompt", "begin + start", "start", NEW),
    "row of the block table": ("prompt", "to(tl.int64) * table_row", "to(tl.int64) * 0", PAGES),
    "request of a program": ("prompt", "next_one < requests", "next_one < requests - 1", PAGES),
    "first row of a tile": ("prompt", "begin // QUERIES - request", "begin // QUERIES", PAGES),
    "decay of totals": ("prompt", "total * decay", "total", PAGES),
    "decay of sums": ("prompt", "sums * decay[:, None]", "sums", PAGES),
    "head of a row": ("prompt", "first_head + row % TILE_HEADS", "first_head", PAGES),
    "tokens of no request": ("prompt", "(token >= tl.load(starts + requests))",
                             "(token > tl.load(starts + requests))", PAGES),
    "values that are not finite": ("prompt", "is_nonfinite[:, None], 0.0", "is_nonfinite[:, None], "
                                   "values", POISONED),
    "their scores": ("prompt", "is_nonfinite[None, :], float(\"nan\")",
                     "is_nonfinite[None, :], scores", POISONED),
    "mark of rows": ("prompt", "if SPECIALIZED:  # marks", "if False:  # marks", POISONED),
    "repair of rows": ("prompt", "seen != seen", "seen > seen", POISONED),
    "block of the cache": ("prompt", "(block < blocks), 0.0", "(block < 0), 0.0", PAGES),
    "sink of a head": ("prompt", "tl.load(sinks + head)", "tl.load(sinks + row * 0)",
                       SINKS),
    "context of new tokens": ("prompt_launch", "seq_lens - torch.diff(call.query_start_loc)",
                              "seq_lens", NEW),
}  # fmt: skip
QUICK = ("causal offset", "page", "first new token", "repair of rows")


def _step(case: dict[str, Any]) -> tuple[Scene, list[Tensor]]:
    """A step and its results; POISONED: with a value that the last ten rows of a request see."""
    step = scene(**case)
    wanted = list(dense(step))
    if case is POISONED:
        step.value_cache[step.block_table[0, 2], 8] = math.nan
        for each in wanted:
            each[10:20] = math.nan
    return step, wanted


def _passes(room: Path, step: Scene, wanted: list[Tensor]) -> bool:
    """Whether a step is right by the kernels of a room, pipelined and specialised."""
    importlib.invalidate_caches()
    names = "launch", "prompt_launch", "tiles"
    paged, prompt, tiles = (importlib.import_module(f"{room.name}.{name}") for name in names)
    tile = tiles.Tile(16, 16, 4, 2)
    by_pages = partial(paged.attend, plan=tiles.Plan(tile, 1))
    close = partial(
        torch.testing.assert_close, rtol=FLOAT_TOLERANCE[BF16], atol=FLOAT_TOLERANCE[BF16],
        equal_nan=True,
    )  # fmt: skip
    try:
        for specialized in (False, True):
            call = test_prompt.with_new_tokens(step)
            results = prompt.attend(call, by_pages, tile, specialized=specialized)
            for each, want in zip(results, wanted, strict=True):
                close(each.double(), want)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("name", slow_but(QUICK, MUTANTS))
def test_a_changed_kernel_is_found(room, name):
    file, text, changed, case = MUTANTS[name]
    path = room / f"{file}.py"
    source = path.read_text()
    assert source.count(text) == 1
    path.write_text(source.replace(text, changed))
    assert not _passes(room, *_step(case))


@pytest.mark.slow
@pytest.mark.parametrize("case", [PAGES, LARGE, NEW, SINKS, POISONED])
def test_the_kernels_as_they_are_pass(room, case):
    assert _passes(room, *_step(case))
