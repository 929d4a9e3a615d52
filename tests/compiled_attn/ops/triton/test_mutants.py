"""Changed kernels that the cases must find: each line of the kernels has a case that needs it."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.compiled_attn.ops.native_scene import Scene, assert_right, scene
from tests.slow import slow_but

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the device")

LONG: dict[str, Any] = {"requests": [(5, 70), (1, 97)], "size": 8, "window": 37, "padding": 1}
WHOLE: dict[str, Any] = {"requests": [(3, 33), (1, 64), (6, 6)], "size": 16}
ODD: dict[str, Any] = {"requests": [(5, 70), (1, 97)], "size": 12}
HALF: dict[str, Any] = {**WHOLE, "dtype": torch.float16, "cache_dtype": torch.int8}
SINKS: dict[str, Any] = {"requests": [(1, 40)], "sinks": torch.tensor([0.3, -1.0, 2.0, 0.0])}

MUTANTS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "window edge": ("attend", "> position[:, None] - window", ">= position[:, None] - window",
                    LONG),
    "first tile of a window": ("attend", "first_position - window + 1, 0) // KEYS",
                               "first_position - window + 1 + KEYS, 0) // KEYS", LONG),
    "tiles inside of a window": ("attend", "tl.maximum(last_position - window + 1, key_begin)",
                                 "tl.maximum(first_position - window - 30, key_begin)", LONG),
    "causal edge": ("attend", "<= position[:, None]", "< position[:, None]", WHOLE),
    "causal offset": ("attend", "position = length - (end - begin) + own",
                      "position = length - (end - begin) + own + 1", WHOLE),
    "tiles before the diagonal": ("attend", "tl.minimum(first_position + 1, length)",
                                  "tl.minimum(last_position + 1, length)", WHOLE),
    "page index": ("attend", "start // PAGE + index // PAGE", "start // PAGE", LONG),
    "page of a whole tile": ("attend", "column, slot = start // PAGE,",
                             "column, slot = start // PAGE * 0,", WHOLE),
    "page of any size": ("attend", "column, slot = key // PAGE,", "column, slot = key // PAGE * 0,",
                         ODD),
    "slot of a whole tile": ("attend", "start % PAGE + index", "start % PAGE + index * 0", WHOLE),
    "slot in pages": ("attend", "index % PAGE", "index % PAGE * 0", LONG),
    "slot in pages of any size": ("attend", "key % PAGE", "key % PAGE * 0", ODD),
    "row of the block table": ("attend", "request.to(tl.int64) * table_row",
                               "request.to(tl.int64) * 0", WHOLE),
    "request of a program": ("attend", "low = middle + 1\n", "low = middle + 2\n", WHOLE),
    "share of a split": ("attend", "key_begin += split * share", "key_begin += split * KEYS",
                         {"requests": [(1, 300)], "size": 16}),
    "split merge, sums": ("merge", "weight[:, None] * tl.load(part,", "tl.load(part,", WHOLE),
    "split merge, totals": ("merge", "weight * tl.load(part_total", "tl.load(part_total", WHOLE),
    "decay of earlier sums": ("attend", "sums * decay[:, None]", "sums", WHOLE),
    "sink": ("merge", "total * own + tl.exp2(raised", "total * own + 0 * tl.exp2(raised", SINKS),
    "scale of values": ("attend", "weights *= scale[None, :]", "weights *= 1.0",
                        {**WHOLE, "cache_dtype": torch.int8}),
    "scale of values, float16": ("attend", "HAS_FP8) * scale[:, None]", "HAS_FP8)", HALF),
}  # fmt: skip
QUICK = ("window edge", "causal offset", "page index", "split merge, sums")


def _passes(room: Path, step: Scene) -> bool:
    """Whether a step is right by the kernels of a room, whole and in splits."""
    importlib.invalidate_caches()
    attend = importlib.import_module(f"{room.name}.launch").attend
    tiles = importlib.import_module(f"{room.name}.tiles")
    try:
        for splits in (1, 3):
            plan = tiles.Plan(tiles.Tile(16, 16, 4, 2), splits)
            assert_right(attend(step.call, plan), step)
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
    assert not _passes(room, scene(**case))


@pytest.mark.slow
@pytest.mark.parametrize("case", [LONG, WHOLE, SINKS, {**WHOLE, "cache_dtype": torch.int8}])
def test_the_kernels_as_they_are_pass(room, case):
    assert _passes(room, scene(**case))
