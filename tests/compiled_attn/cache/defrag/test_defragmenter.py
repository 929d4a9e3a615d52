"""When the defragmenter is due, what it plans, that content survives it, and that errors change
nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch

from compiled_attn.cache.blocks import BlockPlaces, BlockPool, UnknownRequest
from compiled_attn.cache.defrag import BlockSwap, DefragTotals, Move, OnlineDefragmenter
from graphs import CapturedGraph, no_compile
from tests.compiled_attn.state import state_of

BLOCKS = 40


def a_swap(blocks: int = BLOCKS, pad_sizes: Iterable[int] = (4, 8, 64)) -> BlockSwap:
    """Over two tensors in which every block says its own number; a block has 24 bytes."""
    cache = [torch.arange(blocks).repeat_interleave(2), torch.arange(blocks)]
    swap = BlockSwap(cache, blocks, pad_sizes=list(pad_sizes))
    swap.warmup()
    return swap


def said(swap: BlockSwap, place: int) -> int:
    """The number that all words of a place say."""
    words = [rows[place].tolist() for rows, _ in swap._memory()]
    (number,) = {word for each in words for word in each}
    return number


def a_pool(used: Iterable[int], idle: Iterable[int] = (), blocks: int = BLOCKS) -> BlockPlaces:
    places = BlockPlaces(blocks)
    for block in (*used, *idle):
        places.use(block)
    for block in idle:
        places.idle(block)
    return places


def a_defragmenter(
    used: Iterable[int], idle: Iterable[int] = (), blocks: int = BLOCKS, **options: Any
) -> OnlineDefragmenter:
    return OnlineDefragmenter(a_pool(used, idle, blocks), a_swap(blocks), **options)


def accounts(defragmenter: OnlineDefragmenter) -> Any:
    return state_of((defragmenter.places, defragmenter._holders)), defragmenter.totals


def assert_kept(defragmenter: OnlineDefragmenter, blocks: Iterable[int]) -> None:
    """Every block still says its own number, where the accounts say it lies."""
    for block in blocks:
        assert said(defragmenter._swap, defragmenter.resolve(block)) == block


# When


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


# What


def test_the_plan_takes_the_highest_used_to_the_lowest_unused_places():
    defragmenter = a_defragmenter(used=[2, 5, 20, 30, 39], idle=[3])
    before = accounts(defragmenter)
    assert defragmenter.plan() == [Move(39, 1, False), Move(30, 3, True), Move(20, 4, False)]
    assert accounts(defragmenter) == before


def test_a_plan_is_bounded_in_blocks_and_in_bytes():
    used = range(20, 40)
    assert len(a_defragmenter(used).plan()) == 19
    assert len(a_defragmenter(used, max_blocks=5).plan()) == 5
    # A block has 24 bytes.
    assert len(a_defragmenter(used, max_bytes=24 * 7 + 23).plan()) == 7
    # An exchange writes two blocks, and two idle ones come first.
    assert len(a_defragmenter(used, idle=[1, 2], max_bytes=24 * 7).plan()) == 5
    assert len(a_defragmenter(used, idle=range(1, 20), max_bytes=24 * 7).plan()) == 3
    assert len(a_defragmenter(used, idle=range(1, 20), max_bytes=48).plan()) == 1


def test_the_cost_of_a_plan_does_not_grow_with_the_pool():
    def lines(blocks: int) -> int:
        swap = BlockSwap([torch.zeros(blocks, dtype=torch.uint8)], pad_sizes=[8])
        used = range(blocks - 8, blocks)
        defragmenter = OnlineDefragmenter(a_pool(used, (), blocks), swap)
        count = 0

        def count_lines(frame: Any, event: str, _: Any) -> Any:
            nonlocal count
            count += event == "line"
            return count_lines

        sys.settrace(count_lines)
        try:
            assert len(defragmenter.plan()) == 8
        finally:
            sys.settrace(None)
        return count

    assert lines(1_000_000) < 1.2 * lines(1000)


def test_defragmenting_moves_content_and_keeps_ids():
    defragmenter = a_defragmenter(used=[2, 5, 20, 30, 39], idle=[3, 25])
    report = defragmenter.defragment()
    assert (report.moves, report.swaps, report.bytes) == (3, 1, 4 * 24)
    assert (report.range_before, report.range_after) == (39, 5)
    assert_kept(defragmenter, [0, 2, 3, 5, 20, 25, 30, 39])
    assert [defragmenter.resolve(block) for block in (39, 30, 20, 2, 5, 3)] == [1, 3, 4, 2, 5, 30]
    assert [defragmenter.unresolve(place) for place in (1, 3, 4)] == [39, 30, 20]
    table = np.array([[39, 30], [20, 0]], dtype=np.int32)
    assert defragmenter.resolve_all(table).tolist() == [[1, 3], [4, 0]]
    assert defragmenter.waste == 0 and defragmenter.plan() == []
    assert defragmenter.totals == DefragTotals(calls=1, moves=3, swaps=1, bytes=96)


def test_several_calls_reach_what_one_without_a_budget_does():
    used, idle = range(20, 40), range(5, 15, 2)
    defragmenter = a_defragmenter(used, idle, max_blocks=3)
    with no_compile():
        reports = [defragmenter.defragment() for _ in range(7)]
    assert [report.moves for report in reports] == [3] * 6 + [1]
    ranges = [report.range_after for report in reports]
    assert ranges == sorted(ranges, reverse=True) and ranges[-1] == 20
    assert_kept(defragmenter, [*used, *idle])
    assert defragmenter.totals.moves == 19
    assert defragmenter.defragment().moves == 0
    assert defragmenter.totals.calls == 7


def test_a_pool_hands_out_low_places_after_it():
    pool, swap = BlockPool(BLOCKS, 1), a_swap()
    defragmenter = OnlineDefragmenter(pool.places, swap, min_gap=1)
    pool.add("a")
    pool.reserve("a", 20)
    pool.add("b")
    pool.reserve("b", 10)
    pool.free("a")
    assert pool.highest_used == 30 and defragmenter.is_due
    defragmenter.defragment()
    assert pool.highest_used == 10
    assert_kept(defragmenter, pool.table("b").blocks)
    pool.add("c")
    pool.reserve("c", 4)
    assert sorted(defragmenter.resolve_all(pool.table("c").blocks)) == [11, 12, 13, 14]


# Copies that fail


class Broken(Exception):
    pass


@pytest.mark.parametrize("at", [1, 2, 3, 4, 5, "commit"])
def test_a_copy_that_fails_midway_leaves_accounts_and_content(at, monkeypatch):
    used, idle = [*range(1, 5), *range(18, 40)], range(6, 14)
    places, swap = a_pool(used, idle), a_swap(pad_sizes=[3])
    defragmenter = OnlineDefragmenter(places, swap)
    before, run = accounts(defragmenter), CapturedGraph.run
    plan, ran = defragmenter.plan(), []
    assert [sum(move.is_swap for move in plan), len(plan)] == [8, 13]  # 5 graph calls

    def failing(graph: CapturedGraph, *inputs: Any) -> Any:
        ran.append(graph.name)
        if len(ran) == at:
            raise Broken
        return run(graph, *inputs)

    def commit(pairs: Any) -> None:
        raise Broken

    monkeypatch.setattr(CapturedGraph, "run", failing)
    if at == "commit":
        monkeypatch.setattr(places, "swap", commit)
    with pytest.raises(Broken):
        defragmenter.defragment()
    assert [name[:5] for name in ran] == ["moves"] * (5 if at == "commit" else at)
    monkeypatch.undo()
    assert accounts(defragmenter) == before
    assert_kept(defragmenter, [0, *used, *idle])
    defragmenter.defragment()
    assert_kept(defragmenter, [0, *used, *idle])
    assert places.highest_used == len(used)


# A scheduler of its own


def own(**options: Any) -> OnlineDefragmenter:
    return OnlineDefragmenter(BLOCKS, a_swap(), **options)


def test_update_follows_requests_and_counts_shared_blocks():
    defragmenter = own()
    defragmenter.update({"a": [30, 31], "b": [30, 35]})
    assert (defragmenter.places.num_used, defragmenter.places.highest_used) == (3, 35)
    defragmenter.update({"a": np.array([36]), "c": []}, finished=["b"])
    assert (defragmenter.places.num_used, defragmenter.places.highest_used) == (3, 36)
    defragmenter.defragment()
    assert_kept(defragmenter, [30, 31, 36])
    assert defragmenter.places.highest_used == 3
    defragmenter.update({}, finished=iter(["a", "c"]))
    assert (defragmenter.places.num_used, defragmenter.waste) == (0, 0)


def test_a_request_that_finishes_and_is_added_again_finishes_first():
    defragmenter = own()
    defragmenter.update({"a": [5, 6]})
    defragmenter.update({"a": [6, 7]}, finished=["a"])
    used = [block for block in range(1, BLOCKS) if defragmenter.places.is_worth_keeping(block)]
    assert used == [6, 7]
    defragmenter.update({}, finished=["a"])
    assert defragmenter.places.num_used == 0


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
    defragmenter = own()
    defragmenter.update({"a": [5, 9], "c": [5]})
    before = accounts(defragmenter)
    with pytest.raises(error, match=text):
        defragmenter.update(*call)
    assert accounts(defragmenter) == before


def test_finishing_a_second_time_is_an_error():
    defragmenter = own()
    defragmenter.update({"a": [5]})
    defragmenter.update({}, finished=["a"])
    with pytest.raises(UnknownRequest, match="'a'"):
        defragmenter.update({}, finished=["a"])


def test_finished_requests_that_never_got_a_block_are_ignored_on_request():
    defragmenter = own()
    defragmenter.update({"a": [5, 6], "b": [7]})
    finished = ["aborted", "a", "aborted"]
    before = accounts(defragmenter)
    with pytest.raises(UnknownRequest, match="'aborted'"):
        defragmenter.update({"c": [8]}, finished)
    assert accounts(defragmenter) == before
    defragmenter.update({"c": [8]}, finished, missing_ok=True)
    used = [block for block in range(1, BLOCKS) if defragmenter.places.is_worth_keeping(block)]
    assert used == [7, 8]
    defragmenter.update({}, ["a"], missing_ok=True)  # again
    assert defragmenter.places.num_used == 2


def test_what_is_wrong_otherwise_is_an_error_whether_or_not_requests_may_be_missing():
    defragmenter = own()
    defragmenter.update({"a": [5]})
    before = accounts(defragmenter)
    with pytest.raises(ValueError, match="'a' twice"):
        defragmenter.update({}, ["a", "x", "a"], missing_ok=True)
    with pytest.raises(ValueError, match="block 5"):
        defragmenter.update({"a": [5]}, ["x"], missing_ok=True)
    assert accounts(defragmenter) == before


def test_the_places_of_a_pool_are_not_updated_by_hand():
    defragmenter = a_defragmenter(used=[3])
    before = accounts(defragmenter)
    with pytest.raises(RuntimeError, match="those of a pool"):
        defragmenter.update({"a": [5]})
    assert accounts(defragmenter) == before


# Bad input, and the end


@pytest.mark.parametrize("wrong", [-1, BLOCKS])
def test_ids_that_are_not_there_are_errors_and_never_the_last_entry(wrong):
    defragmenter = own()
    for call in (defragmenter.resolve, defragmenter.unresolve, defragmenter.resolve_all):
        with pytest.raises(ValueError, match=str(wrong)):
            call(wrong if call != defragmenter.resolve_all else [[1, wrong]])  # type: ignore[arg-type]


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
def test_limits_that_make_no_sense_are_errors(options, error, text):
    with pytest.raises(error, match=text):
        own(**options)


@pytest.mark.parametrize("places", [BLOCKS + 1, BlockPlaces(BLOCKS - 1)])
def test_places_of_another_size_than_the_cache_are_an_error(places):
    with pytest.raises(ValueError, match=rf"{BLOCKS} blocks of the cache"):
        OnlineDefragmenter(places, a_swap())


def test_a_swap_that_is_not_ready_is_an_error_and_changes_nothing():
    cache = torch.zeros(BLOCKS)
    defragmenter = OnlineDefragmenter(a_pool([33]), BlockSwap([cache]))
    before = accounts(defragmenter)
    with pytest.raises(RuntimeError, match=r"call warmup\(\)"):
        defragmenter.defragment()
    assert accounts(defragmenter) == before


def test_its_repr_says_how_it_goes():
    defragmenter = a_defragmenter([33])
    defragmenter.defragment()
    shown = repr(defragmenter)
    assert "num_used=1" in shown and "highest_used=1" in shown and "moves=1" in shown
