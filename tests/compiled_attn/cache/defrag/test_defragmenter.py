"""When a defragmentation is due, what it plans and moves, and failed copies that change nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from compiled_attn.cache.blocks import BlockPool
from compiled_attn.cache.blocks.states import BlockStates
from compiled_attn.cache.defrag import (
    BlockSwap,
    DefragTotals,
    LogicalBlocks,
    Move,
    OnlineDefragmenter,
)
from graphs import CapturedGraph, no_compile
from tests.compiled_attn.state import state_of
from tests.compiled_attn.work import lines_run

BLOCKS = 40


class Tracked(BlockStates):
    """Blocks in any state that remember where each of them went."""

    def __init__(self, used: Iterable[int], cached: Iterable[int] = (), blocks: int = BLOCKS):
        super().__init__(blocks)
        self.at = list(range(blocks))
        for block in (*used, *cached):
            self.use(block)
        for block in cached:
            self.cache(block)

    def exchange(self, pairs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        for a, b in (checked := super().exchange(pairs)):
            x, y = self.at.index(a), self.at.index(b)
            self.at[x], self.at[y] = b, a
        return checked


def a_swap(blocks: int = BLOCKS, pad_sizes: Iterable[int] = (4, 8, 64)) -> BlockSwap:
    """Over two tensors in which every block holds its own number; a block has 24 bytes."""
    cache = [torch.arange(blocks).repeat_interleave(2), torch.arange(blocks)]
    swap = BlockSwap(cache, blocks, pad_sizes=list(pad_sizes))
    swap.warmup()
    return swap


def a_defragmenter(
    used: Iterable[int], cached: Iterable[int] = (), **options: Any
) -> OnlineDefragmenter:
    return OnlineDefragmenter(Tracked(used, cached), a_swap(), **options)


def snapshot(defragmenter: OnlineDefragmenter) -> Any:
    return state_of(defragmenter.blocks), defragmenter.totals


def assert_kept(defragmenter: OnlineDefragmenter, blocks: Iterable[int]) -> None:
    """Every block still holds its own number, wherever it went."""
    for block in blocks:
        at = defragmenter.blocks.at[block]
        words = [rows[at].tolist() for rows, _ in defragmenter._swap._memory()]
        assert {word for each in words for word in each} == {block}


@pytest.mark.parametrize(
    ("used", "options", "waste", "is_due"),
    [
        ([33], {}, 32 / 33, True),
        ([33], {"min_gap": 33}, 32 / 33, False),
        ([8], {}, 7 / 8, False),
        ([9], {}, 8 / 9, True),
        ([9], {"max_waste": 1.0}, 8 / 9, False),
        (range(1, 39), {}, 0.0, False),
        ([], {}, 0.0, False),
        (range(9, 33), {"max_waste": 0.25}, 0.25, False),
        (range(9, 33), {"max_waste": 0.24}, 0.25, True),
        ([1, 3], {"max_waste": 0, "min_gap": 1}, 1 / 3, True),
    ],
)
def test_it_is_due_by_the_share_of_waste_with_a_floor_in_blocks(used, options, waste, is_due):
    defragmenter = a_defragmenter(used, **options)
    assert defragmenter.waste == pytest.approx(waste)
    assert defragmenter.is_due is is_due


def test_the_plan_moves_the_highest_used_blocks_to_the_lowest_unused():
    defragmenter = a_defragmenter(used=[2, 5, 20, 30, 39], cached=[3])
    before = snapshot(defragmenter)
    assert defragmenter.plan() == [Move(39, 1, False), Move(30, 3, True), Move(20, 4, False)]
    assert snapshot(defragmenter) == before


@pytest.mark.parametrize(
    ("cached", "options", "moves"),
    [
        ([], {}, 19),
        ([], {"max_blocks": 5}, 5),
        ([], {"max_bytes": 24 * 7 + 23}, 7),  # a block has 24 bytes
        ([1, 2], {"max_bytes": 24 * 7}, 5),  # two exchanges come first, which write two blocks each
        (range(1, 20), {"max_bytes": 24 * 7}, 3),
        (range(1, 20), {"max_bytes": 48}, 1),
    ],
)
def test_a_plan_is_bounded_in_blocks_and_in_bytes(cached, options, moves):
    assert len(a_defragmenter(range(20, 40), cached, **options).plan()) == moves


def test_the_cost_of_a_plan_does_not_grow_with_the_pool():
    def lines(blocks: int) -> int:
        swap = BlockSwap([torch.zeros(blocks, dtype=torch.uint8)], pad_sizes=[8])
        states = BlockStates(blocks)
        for block in range(blocks - 8, blocks):
            states.use(block)
        defragmenter = OnlineDefragmenter(states, swap)
        assert len(defragmenter.plan()) == 8
        return lines_run(defragmenter.plan)

    assert lines(1_000_000) < 1.2 * lines(1000)


def test_defragmenting_moves_and_exchanges_contents():
    defragmenter = a_defragmenter(used=[2, 5, 20, 30, 39], cached=[3, 25])
    report = defragmenter.defragment()
    assert (report.moves, report.swaps, report.bytes) == (3, 1, 4 * 24)
    assert (report.range_before, report.range_after) == (39, 5)
    assert_kept(defragmenter, [0, 2, 3, 5, 20, 25, 30, 39])
    assert [defragmenter.blocks.at[block] for block in (39, 30, 20, 2, 5, 3)] == [1, 3, 4, 2, 5, 30]
    assert defragmenter.waste == 0 and defragmenter.plan() == []
    assert defragmenter.totals == DefragTotals(calls=1, moves=3, swaps=1, bytes=96)
    assert "num_used=5, highest_used=5" in repr(defragmenter) and "moves=3" in repr(defragmenter)


def test_several_calls_reach_what_one_without_a_budget_does():
    used, cached = range(20, 40), range(5, 15, 2)
    defragmenter = a_defragmenter(used, cached, max_blocks=3)
    with no_compile():
        reports = [defragmenter.defragment() for _ in range(7)]
    assert [report.moves for report in reports] == [3] * 6 + [1]
    ranges = [report.range_after for report in reports]
    assert ranges == sorted(ranges, reverse=True) and ranges[-1] == 20
    assert_kept(defragmenter, [*used, *cached])
    assert defragmenter.totals.moves == 19
    assert defragmenter.defragment().moves == 0
    assert defragmenter.totals.calls == 7


def test_a_pool_allocates_low_blocks_after_it():
    pool = BlockPool(BLOCKS, 1)
    defragmenter = OnlineDefragmenter(pool, a_swap(), min_gap=1)
    for name, length in (("a", 20), ("b", 10)):
        pool.add(name)
        pool.reserve(name, length)
    pool.free("a")
    assert pool.highest_used == 30 and defragmenter.is_due
    defragmenter.defragment()
    assert pool.highest_used == 10
    rows = defragmenter._swap.get_buffer("rows_1")[:, 0]
    assert rows[pool.table("b").blocks].tolist() == list(range(21, 31))
    pool.add("c")
    assert pool.reserve("c", 4) == [11, 12, 13, 14]


class Broken(Exception):
    pass


@pytest.mark.parametrize("at", [1, 3, 5, "take", "put", "exchange"])
def test_a_copy_that_fails_midway_leaves_tables_and_contents(at, monkeypatch):
    used, cached = [*range(1, 5), *range(18, 40)], range(6, 14)
    swap = a_swap(pad_sizes=[3])
    defragmenter = OnlineDefragmenter(Tracked(used, cached), swap)
    before, run, calls = snapshot(defragmenter), CapturedGraph.run, []
    plan = defragmenter.plan()
    assert [sum(move.is_swap for move in plan), len(plan)] == [8, 13]  # 5 graph calls

    def failing(function: Any, at: int) -> Any:
        def call(*args: Any) -> Any:
            calls.append(args)
            if len(calls) == at:
                raise Broken
            return function(*args)

        return call

    if isinstance(at, int):
        monkeypatch.setattr(CapturedGraph, "run", failing(run, at))
    elif at == "exchange":
        monkeypatch.setattr(defragmenter.blocks, "exchange", failing(None, 1))
    else:
        monkeypatch.setattr(swap, at, failing(getattr(swap, at), 1))
    with pytest.raises(Broken):
        defragmenter.defragment()
    monkeypatch.undo()
    assert snapshot(defragmenter) == before
    assert_kept(defragmenter, [0, *used, *cached])
    defragmenter.defragment()
    assert_kept(defragmenter, [0, *used, *cached])
    assert defragmenter.blocks.highest_used == len(used)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"max_waste": -0.1}, ValueError, "0..1, got -0.1"),
        ({"max_waste": 25}, ValueError, "0..1, got 25"),
        ({"max_waste": float("nan")}, ValueError, "nan"),
        ({"min_gap": 0}, ValueError, "min_gap >= 1"),
        ({"max_blocks": 0}, ValueError, "max_blocks >= 1"),
        ({"max_blocks": 1.5}, TypeError, "max_blocks"),
        ({"max_bytes": 47}, ValueError, "at least 48.*got 47"),
    ],
)
def test_limits_out_of_range_are_errors(options, error, text):
    with pytest.raises(error, match=text):
        a_defragmenter([33], **options)


def test_blocks_of_another_size_than_the_cache_are_an_error():
    with pytest.raises(ValueError, match=rf"{BLOCKS} blocks of the cache, got {BLOCKS + 1}"):
        OnlineDefragmenter(LogicalBlocks(BLOCKS + 1), a_swap())


def test_a_swap_that_is_not_warmed_up_is_an_error_and_changes_nothing():
    defragmenter = OnlineDefragmenter(Tracked([33]), BlockSwap([torch.zeros(BLOCKS)]))
    before = snapshot(defragmenter)
    with pytest.raises(RuntimeError, match=r"call warmup\(\)"):
        defragmenter.defragment()
    assert snapshot(defragmenter) == before
