"""A pool whose windowed layers have blocks of their own, against what their memory must hold.

Every slot of both memories holds the tokens up to there. What a request computed must be in its
blocks, and what it still sees also in its near blocks, whoever wrote it.
"""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from compiled_attn.cache.blocks import OutOfBlocks
from compiled_attn.cache.blocks.grouped import GroupedPool
from tests.slow import slow_but

SIZE = 2


class Modelled:
    """Calls a pool, and writes to both memories what the layers would."""

    def __init__(self, window: int, blocks: int, near: int) -> None:
        self.near_of = np.zeros(blocks, np.int32)
        self.pool = GroupedPool(
            blocks, SIZE, near_window=window, num_near=near, near_of=self.near_of, key=b"test"
        )
        self.window = window
        self.tokens: dict[str, list[int]] = {}
        self.released: dict[str, int] = {}  # positions that a request sees no more
        self.far: dict[tuple[int, int], tuple[int, ...]] = {}
        self.near: dict[tuple[int, int], tuple[int, ...]] = {}
        self.counts: Counter[str] = Counter()

    def add(self, name: str, tokens: list[int]) -> None:
        at_once = -(-(self.window + 4) // SIZE) + 1
        fits = self.pool.can_allocate(len(tokens), tokens, at_once=at_once)
        self.tokens[name] = tokens
        table = self.pool.add(name, tokens)
        self.released[name] = max(0, table.length - self.window + 1)
        self.counts["hits"] += table.num_cached_tokens
        self.counts["refused"] += not fits
        if fits:
            assert self.pool.try_reserve(name, min(len(tokens), table.length + 4))

    def compute(self, name: str, count: int, new: int) -> None:
        table, tokens = self.pool.table(name), self.tokens[name]
        start = table.num_computed
        tokens += [new] * (start + count - len(tokens))
        before = self.state()
        if not self.pool.try_reserve(name, start + count):
            assert self.state() == before
            with pytest.raises(OutOfBlocks):
                self.pool.reserve(name, start + count)
            self.counts["no room"] += 1
            return
        for position in range(start, start + count):
            block, offset = divmod(table.slot(position), SIZE)
            self.far[block, offset] = tuple(tokens[: position + 1])
            assert self.near_of[block]
            self.near[int(self.near_of[block]), offset] = tuple(tokens[: position + 1])
        self.check()
        self.pool.commit(name, tokens, start + count)
        first = max(0, start + count - self.window + 1)
        following = self.pool.release_before(name, first)
        assert following == (first // SIZE + 1) * SIZE
        self.released[name] = first

    def free(self, name: str, *, preempt: bool) -> None:
        (self.pool.preempt if preempt else self.pool.free)(name)
        del self.tokens[name]

    def exchange(self, a: int, b: int) -> None:
        """Blocks move in one memory and stay where they are in the other."""
        for offset in range(SIZE):
            ends = (a, offset), (b, offset)
            values = [self.far.pop(each, ()) for each in ends]
            self.far.update(zip(ends, reversed(values), strict=True))
        self.pool.exchange([(a, b)])

    def state(self) -> list[object]:
        near = self.pool.near
        return [self.near_of.tolist(), near.available, near.num_needed, self.pool.available]

    def check(self) -> None:
        pool, needs = self.pool, Counter[int]()
        for name, tokens in self.tokens.items():
            table = pool.table(name)
            for position in range(table.num_computed):
                block, offset = divmod(table.slot(position), SIZE)
                assert self.far[block, offset] == tuple(tokens[: position + 1])
                if position >= self.released[name]:
                    near = int(self.near_of[block])
                    assert self.near[near, offset] == tuple(tokens[: position + 1])
            needs.update(table.blocks[self.released[name] // SIZE :])
        assert all(self.near_of[block] for block in needs)
        lent = self.near_of[self.near_of > 0].tolist()
        assert len(lent) == len(set(lent))
        assert pool.near.num_needed == len(needs) <= pool.near.peak_needed
        assert pool.near.available == pool.near.num_near - 1 - len(needs)
        assert len(pool.near._free) + len(lent) == pool.near.num_near - 1  # none is lost
        assert pool.available == min(pool._blocks.available, pool.near.available)


@pytest.mark.parametrize("seed", slow_but(range(4), range(60)))
def test_any_sequence_of_calls_finds_what_it_sees(seed):
    rng, total = random.Random(seed), Counter[str]()
    for _ in range(30):
        near = rng.randrange(6, 12)
        both = Modelled(rng.randrange(1, 7), rng.randrange(near, 30), near)
        for _ in range(80):
            live = [*both.tokens]
            event = rng.choice(("add", "step", "step", "step", "free", "exchange"))
            if event == "add" and len(live) < 4:
                prompt = [0] * rng.randrange(14) + rng.choices((0, 1), k=rng.randrange(1, 4))
                both.add(next(each for each in "abcd" if each not in live), prompt)
            elif event == "step" and live:
                name = rng.choice(live)
                rest = len(both.tokens[name]) - both.pool.table(name).num_computed
                both.compute(name, max(1, min(rest, rng.randrange(1, 5))), rng.randrange(2))
            elif event == "free" and live:
                both.free(rng.choice(live), preempt=rng.random() < 0.5)
            elif event == "exchange":
                a, b = rng.sample(range(1, both.pool.num_blocks), 2)
                both.exchange(a, b)
            both.check()
        for name in [*both.tokens]:
            both.free(name, preempt=False)
        assert both.pool.num_used == both.pool.near.num_needed == 0
        total += both.counts
    assert min(total["hits"], total["refused"], total["no room"]) > 0


def test_a_request_longer_than_the_near_blocks_runs():
    both = Modelled(window=5, blocks=100, near=7)
    both.add("a", list(range(150)))
    while both.pool.table("a").num_computed < 190:
        both.compute("a", 4, 7)
    assert both.pool.num_used == 95 + 1 and both.pool.near.peak_needed <= 5
    assert not both.counts["no room"]


def test_a_prefix_is_found_if_the_blocks_of_its_last_window_are_lent():
    both = Modelled(window=5, blocks=100, near=8)
    tokens = list(range(40))
    both.add("a", [*tokens])
    for _ in range(10):
        both.compute("a", 4, 7)
    both.free("a", preempt=False)
    both.add("b", [*tokens, 1])
    assert both.pool.table("b").num_cached_tokens == 40
    both.free("b", preempt=False)
    both.add("c", [*tokens[:20], 1])  # the near blocks of these were lent to later ones
    assert both.pool.table("c").num_cached_tokens == 0


def test_a_fork_is_refused():
    both = Modelled(window=5, blocks=20, near=8)
    both.add("a", [1, 2, 3])
    with pytest.raises(RuntimeError, match=r"^expected requests that are not forked, got a fork"):
        both.pool.fork("a", "b")
    assert both.pool.requests == ["a"]


def test_a_position_that_is_not_computed_cannot_be_released():
    both = Modelled(window=5, blocks=20, near=8)
    both.add("a", [1, 2, 3])
    with pytest.raises(ValueError, match=r"position <= 0 \(computed\) .* got 2: commit first"):
        both.pool.release_before("a", 2)
