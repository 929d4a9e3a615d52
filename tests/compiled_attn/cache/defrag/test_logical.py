"""Logical blocks of a scheduler with its own allocator: its reports and the mapping."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from compiled_attn.cache.blocks import UnknownRequest
from compiled_attn.cache.defrag import LogicalBlocks
from tests.compiled_attn.state import state_of

BLOCKS = 40


def reported(new: dict[str, list[int]] | None = None) -> LogicalBlocks:
    blocks = LogicalBlocks(BLOCKS)
    blocks.update({"a": [5, 9], "c": [5]} if new is None else new)
    return blocks


def used(blocks: LogicalBlocks) -> list[int]:
    return [block for block in range(1, BLOCKS) if blocks.has_content(blocks.resolve(block))]


def test_an_update_follows_requests_and_counts_shared_blocks():
    blocks = reported({"a": [30, 31], "b": [30, 35]})
    assert (blocks.num_used, blocks.highest_used) == (3, 35)
    blocks.update({"a": np.array([36]), "c": []}, finished=["b"])
    assert (used(blocks), blocks.highest_used) == ([30, 31, 36], 36)
    blocks.exchange(blocks.compaction(8))
    assert blocks.highest_used == 3
    assert [blocks.resolve(block) for block in (36, 31, 30)] == [1, 2, 3]
    assert [blocks.unresolve(block) for block in (1, 2, 3, 36)] == [36, 31, 30, 1]
    blocks.update({}, finished=iter(["a", "c"]))
    assert (blocks.num_used, blocks.highest_used) == (0, 0)


def test_a_request_that_finishes_and_is_added_again_finishes_first():
    blocks = reported({"a": [5, 6]})
    blocks.update({"a": [6, 7]}, finished=["a"])
    assert used(blocks) == [6, 7]
    blocks.update({}, finished=["a"])
    with pytest.raises(UnknownRequest, match="'a'"):
        blocks.update({}, finished=["a"])
    assert used(blocks) == []


WRONG_UPDATES: dict[str, tuple[tuple[Any, ...], type[Exception], str]] = {
    "unknown request": (({}, ["a", "x"]), UnknownRequest, "'x'"),
    "finished twice at once": (({}, ["a", "a"]), ValueError, "'a' twice"),
    "a block it holds": (({"b": [7], "a": [8, 5]}, []), ValueError, "block 5.*'a'"),
    "a block twice": (({"b": [7, 7]}, ["a"]), ValueError, "block 7.*'b'"),
    "the null block": (({"b": [7, 0]}, ["a"]), ValueError, "block of request 'b' >= 1, got 0"),
    "minus one": (({"b": [-1]}, ["a"]), ValueError, "'b'.*-1"),
    "beyond the cache": (({"b": [BLOCKS]}, ["a"]), ValueError, f"block {BLOCKS}.*'b'"),
    "no integer": (({"b": [1.5]}, ["a"]), TypeError, "'b'.*1.5"),
}


@pytest.mark.parametrize(("call", "error", "text"), WRONG_UPDATES.values(), ids=WRONG_UPDATES)
def test_a_wrong_update_is_an_error_that_names_it_and_changes_nothing(call, error, text):
    blocks = reported()
    before = state_of(blocks)
    with pytest.raises(error, match=text):
        blocks.update(*call)
    if error is not UnknownRequest:  # whether or not requests may be missing
        with pytest.raises(error, match=text):
            blocks.update(*call, missing_ok=True)
    assert state_of(blocks) == before


def test_finished_requests_that_never_got_a_block_are_ignored_on_request():
    blocks = reported({"a": [5, 6], "b": [7]})
    finished = ["aborted", "a", "aborted"]
    before = state_of(blocks)
    with pytest.raises(UnknownRequest, match="'aborted'"):
        blocks.update({"c": [8]}, finished)
    assert state_of(blocks) == before
    blocks.update({"c": [8]}, finished, missing_ok=True)
    assert used(blocks) == [7, 8]
    blocks.update({}, ["a"], missing_ok=True)  # again
    assert used(blocks) == [7, 8]


def test_tables_of_any_shape_are_resolved_at_once_and_padding_stays_null():
    blocks = LogicalBlocks(20)
    blocks.exchange([(4, 9), (1, 2)])
    assert blocks.resolve_all(np.array([[4, 1, 0], [2, 0, 0]])).tolist() == [[9, 2, 0], [1, 0, 0]]
    assert blocks.resolve_all(9).shape == () and int(blocks.resolve_all(9)) == 4
    assert blocks.resolve_all([]).shape == (0,)
    assert blocks.resolve_all(np.zeros((2, 0), np.int32)).shape == (2, 0)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8])
def test_resolved_tables_are_new_and_int32_only_if_the_table_is(dtype):
    blocks, table = LogicalBlocks(300), np.array([0, 7, 200], dtype)
    resolved = blocks.resolve_all(table)
    assert resolved.dtype == (np.int32 if dtype is np.int32 else np.int64)
    resolved[:] = 1
    assert table.tolist() == blocks.resolve_all(table).tolist() == [0, 7, 200]


@pytest.mark.parametrize("wrong", [-1, -BLOCKS, BLOCKS, 10**12])
def test_an_id_out_of_range_is_named_and_never_the_last_entry(wrong):
    blocks = reported()
    for call in (blocks.resolve, blocks.unresolve):
        with pytest.raises(ValueError, match=rf"expected block .*got {wrong}\b"):
            call(wrong)
    for table in ([wrong], [[1, 2], [3, wrong]], np.array([wrong])):
        with pytest.raises(ValueError, match=rf"expected block .*got {wrong}\b"):
            blocks.resolve_all(table)


@pytest.mark.parametrize("wrong", [1.0, "a", None])
def test_an_id_that_is_no_integer_is_refused(wrong):
    with pytest.raises(TypeError, match="expected an integer block"):
        reported().resolve(wrong)
    with pytest.raises(TypeError, match="expected integer blocks"):
        reported().resolve_all([wrong])
