"""Copies, exchanges and changes of places that are interrupted at every single line.

Whatever line it is, every block still shows its payload where the accounts say it lies, and the
next call goes on.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch

from compiled_attn import PagedKVCache
from compiled_attn.cache.blocks import BlockPlaces, BlockPool
from compiled_attn.cache.defrag import BlockSwap, OnlineDefragmenter
from graphs import CapturedGraph
from tests.compiled_attn.state import state_of
from tests.interrupts import count_lines, interrupted_at
from tests.slow import slow_but

BLOCKS = 24
USED, IDLE = (4, 9, 14, 17, 18, 20, 21, 23), (2, 3, 5, 11, 19)
SLOW = pytest.mark.slow
BACKENDS = [
    "eager",
    *(pytest.param(name, marks=SLOW) for name in ("aot_eager", "inductor", "aoti")),
]


class Broken(Exception):
    pass


class Scene:
    """A cache in which every block is filled with its own number, and a pool in disorder."""

    def __init__(self, backend: str = "eager") -> None:
        self.cache = PagedKVCache(1, BLOCKS, 2, 1, 8, dtype=torch.int8)
        self.arrays = [tensor.numpy() for tensor in self.cache.buffers()]
        self.swap = BlockSwap(self.cache, pad_sizes=(3,), backend=backend)
        self.swap.warmup()

    def reset(self) -> OnlineDefragmenter:
        for tensor in self.cache.buffers():
            tensor.unflatten(0, (BLOCKS, -1)).copy_(numbers(tensor))
        places = BlockPlaces(BLOCKS)
        for block in (*USED, *IDLE):
            places.use(block)
        for block in IDLE:
            places.idle(block)
        return OnlineDefragmenter(places, self.swap, max_blocks=8)

    def shown(self, place: int) -> set[int]:
        """All numbers that a place of the cache shows."""
        slots = slice(2 * place, 2 * place + 2)
        return {n for array in self.arrays for n in array[slots].ravel().tolist()}

    def check(self, defragmenter: OnlineDefragmenter, where: str) -> None:
        places = defragmenter.places
        # Before anything is mended: no interrupt may lose what a request reads.
        raw = [self.shown(int(places._place_view[block])) for block in USED]
        assert raw == [{block} for block in USED], where
        for block in (*USED, *IDLE):
            assert self.shown(defragmenter.resolve(block)) == {block}, where
        assert places.restore is None, where
        at = places.resolve_all(range(BLOCKS)).tolist()
        assert sorted(at) == list(range(BLOCKS)) and at[0] == 0, where
        assert [places.unresolve(place) for place in at] == list(range(BLOCKS)), where
        assert (places.num_used, places.num_idle) == (len(USED), len(IDLE)), where
        assert places.num_free == BLOCKS - 1 - len(USED) - len(IDLE), where
        assert places.highest_used == max(at[block] for block in USED), where
        kept = [place for place in range(1, BLOCKS) if places.is_worth_keeping(place)]
        assert kept == sorted(at[block] for block in (*USED, *IDLE)), where


def numbers(tensor: torch.Tensor) -> torch.Tensor:
    shape = (BLOCKS, *[1] * tensor.dim())
    return torch.arange(BLOCKS).to(tensor.dtype).view(shape)


@pytest.fixture(scope="module")
def scenes() -> Callable[[str], Scene]:
    return functools.cache(Scene)


def go_on(scene: Scene, defragmenter: OnlineDefragmenter, where: str) -> None:
    """The next calls do what is left."""
    while defragmenter.plan():
        defragmenter.defragment()
    assert defragmenter.places.highest_used == len(USED), where
    scene.check(defragmenter, where)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_defragmentation_that_is_interrupted_at_any_line_loses_nothing(
    scenes: Callable[[str], Scene], backend: str
) -> None:
    scene = scenes(backend)
    defragmenter = scene.reset()
    plan = defragmenter.plan()
    assert [move.is_swap for move in plan].count(True) == 3 and len(plan) > 2 * 3  # 3 graph calls
    lines, reached = count_lines(defragmenter.defragment), set()
    assert lines > 300
    print("LINES", backend, lines)
    for n in range(lines + 1):
        defragmenter = scene.reset()
        with suppress(KeyboardInterrupt), interrupted_at(n) as cut:
            defragmenter.defragment()
        reached.add(cut.where.split(":")[0])
        scene.check(defragmenter, cut.where)
        go_on(scene, defragmenter, cut.where)
    assert not cut.was_raised  # every line was hit
    files = {f"compiled_attn/cache/defrag/{name}.py" for name in ("defragmenter", "swap", "lists")}
    assert {*files, "compiled_attn/cache/blocks/places.py", "graphs/capture/capture.py"} <= reached


@pytest.mark.parametrize("at", slow_but((3,), (1, 3)))
def test_a_copy_that_fails_and_an_interrupt_while_that_is_handled_lose_nothing(
    scenes: Callable[[str], Scene], monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    scene, run, runs = scenes("eager"), CapturedGraph.run, 0

    def failing(graph: CapturedGraph, *inputs: Any) -> Any:
        nonlocal runs
        runs += 1
        if runs == at:
            raise Broken
        return run(graph, *inputs)

    def attempt(n: int) -> tuple[OnlineDefragmenter, Any]:
        nonlocal runs
        runs, defragmenter = 0, scene.reset()
        monkeypatch.setattr(CapturedGraph, "run", failing)
        with suppress(KeyboardInterrupt, Broken), interrupted_at(n) as cut:
            defragmenter.defragment()
        monkeypatch.undo()
        return defragmenter, cut

    n, cut = 0, None
    while cut is None or cut.was_raised:
        defragmenter, cut = attempt(n)
        scene.check(defragmenter, cut.where)
        go_on(scene, defragmenter, cut.where)
        n += 1
    assert n > 200


def test_what_an_interrupt_left_set_aside_is_put_back_before_a_place_is_read(
    scenes: Callable[[str], Scene],
) -> None:
    scene = scenes("eager")
    pending = 0
    for n in range(count_lines(scene.reset().defragment)):
        defragmenter = scene.reset()
        with suppress(KeyboardInterrupt), interrupted_at(n) as cut:
            defragmenter.defragment()
        if defragmenter.places.restore is None:
            continue
        pending += 1
        # Interrupted once more, at every line of putting back.
        for m in itertools.count():
            with suppress(KeyboardInterrupt), interrupted_at(m) as again:
                defragmenter.places.resolve_all([[1, 0]])
            if not again.was_raised:
                break
        scene.check(defragmenter, cut.where)
    assert pending > 0


@pytest.mark.parametrize("pairs", [[(23, 1), (21, 2), (20, 6)], [(4, 22), (9, 14), (11, 3)]])
def test_places_change_all_or_none_at_any_line(pairs: list[tuple[int, int]]) -> None:
    def places() -> BlockPlaces:
        made = BlockPlaces(5000)
        for block in (*USED, *IDLE, 4000, 4999):
            made.use(block)
        for block in IDLE:
            made.idle(block)
        return made

    pairs = [*pairs, (4000, 7), (4999, 8), (1500, 3500)]
    before, after = state_of(places()), places()
    lines = count_lines(lambda: after.swap(pairs))
    done = 0
    for n in range(lines):
        torn = places()
        with suppress(KeyboardInterrupt), interrupted_at(n) as cut:
            torn.swap(pairs)
        assert cut.was_raised and state_of(torn) in (before, state_of(after)), cut.where
        done += state_of(torn) != before
    assert done == 0  # the one statement that changes anything is the last


# Copies on write


def copy_step(pool: BlockPool, swap: BlockSwap) -> None:
    """What an engine does before each step, as docs/reference/blocks.md says."""
    copies = pool.pending_copies()
    if copies:
        swap.move(pool.places.resolve_all(np.array(copies)))
        pool.copied(copies)


def test_copies_on_write_that_are_interrupted_at_any_line_are_still_made(
    scenes: Callable[[str], Scene],
) -> None:
    scene = scenes("eager")

    def forked() -> BlockPool:
        scene.reset()
        pool = BlockPool(BLOCKS, 2)
        tokens = list(range(7))
        pool.add("a", tokens)
        pool.reserve("a", 7)
        pool.commit("a", tokens, 7)
        for child in range(5):  # more copies than one graph call makes
            pool.fork("a", child)
            pool.append(child)
        return pool

    pool = forked()
    lines = count_lines(lambda: copy_step(pool, scene.swap))
    assert lines > 200
    for n in range(lines):
        pool = forked()
        with suppress(KeyboardInterrupt), interrupted_at(n) as cut:
            copy_step(pool, scene.swap)
        assert cut.was_raised
        copy_step(pool, scene.swap)
        assert pool.pending_copies() == [], cut.where
        for child in range(5):
            block = pool.table(child).blocks[-1]
            assert scene.shown(pool.places.resolve(block)) == {4}, cut.where
            pool.commit(child, list(range(8)), 8)


# Contents outside of the cache


def test_what_is_taken_can_be_put_anywhere_and_again() -> None:
    scene = Scene()
    scene.reset()
    contents = scene.swap.take([5, 7])
    scene.swap.move([(1, 5), (2, 7)])
    assert (scene.shown(5), scene.shown(7)) == ({1}, {2})
    for _ in range(2):
        scene.swap.put([7, 9], contents)
        assert (scene.shown(7), scene.shown(9), scene.shown(5)) == ({5}, {7}, {1})


WRONG: list[tuple[Iterable[Any], type[Exception], str]] = [
    ([1, 0], ValueError, r"places in 1\.\.23, got 0"),
    ([-1], ValueError, "got -1"),
    ([BLOCKS], ValueError, "got 24"),
    ([3, 3], ValueError, "place 3 twice"),
    ([1.5], TypeError, "integer places"),
    ([[1, 2]], TypeError, r"shape \[1, 2\]"),
]


@pytest.mark.parametrize(("places", "error", "text"), WRONG)
def test_wrong_places_are_an_error_and_nothing_changes(
    scenes: Callable[[str], Scene], places: Any, error: type[Exception], text: str
) -> None:
    scene = scenes("eager")
    scene.reset()
    contents = scene.swap.take([5, 6])
    with pytest.raises(error, match=text):
        scene.swap.take(places)
    with pytest.raises(error, match=text):
        scene.swap.put(places, contents)
    assert [scene.shown(place) for place in range(BLOCKS)] == [{n} for n in range(BLOCKS)]
