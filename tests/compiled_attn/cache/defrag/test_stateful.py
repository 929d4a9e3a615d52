"""Random events in any order: no content is lost, no two blocks alias, all counts agree.

The caches are real; every block or position is tagged with a payload of its own.
"""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from compiled_attn.cache.blocks import BlockPool, OutOfBlocks, UnknownRequest
from compiled_attn.cache.defrag import BlockSwap, LogicalBlocks, OnlineDefragmenter
from graphs import available_backends

NAMES = "abcdef"
PICK = st.integers(0, 50)


class Cache:
    """Flat slots of K and V that know what was written where."""

    def __init__(self, blocks: int, size: int) -> None:
        self.size = size
        self.tensors = [torch.zeros(blocks * size, dtype=torch.int32) for _ in range(2)]
        self.swap = BlockSwap(self.tensors, blocks, pad_sizes=(1, 3))
        self.swap.warmup()

    def write(self, slot: int, payload: int) -> None:
        for sign, tensor in zip((1, -1), self.tensors, strict=True):
            tensor[slot] = sign * payload

    def read(self, slot: int) -> int:
        key, value = (int(tensor[slot]) for tensor in self.tensors)
        assert key == -value
        return key


@dataclass
class Row:
    """A request as the model sees it."""

    tokens: list[int]
    length: int = 0
    computed: int = 0

    def payload(self, position: int) -> int:
        """Different for all prefixes that occur."""
        number = 1
        for token in self.tokens[: position + 1]:
            number = 3 * number + token
        return number


LIMITS = st.sampled_from([1, 2, 5, 64])
BUDGETS = st.sampled_from([None, None, 2, 3, 5])


class PoolMachine(RuleBasedStateMachine):
    """A pool with prefix sharing; positions are tagged."""

    @initialize(blocks=st.integers(2, 14), size=st.integers(1, 3))
    def make(self, blocks: int, size: int) -> None:
        self.pool = BlockPool(blocks, size)
        self.cache = Cache(blocks, size)
        self.rows: dict[str, Row] = {}

    def live(self, pick: int) -> str:
        return list(self.rows)[pick % len(self.rows)]

    def unused(self, pick: int) -> str:
        names = [name for name in NAMES if name not in self.rows]
        return names[pick % len(names)]

    def copy(self) -> None:
        pairs = self.pool.pending_copies()
        if pairs:
            self.cache.swap.move(pairs)
            self.pool.copied(pairs)

    @precondition(lambda self: len(self.rows) < len(NAMES))
    @rule(pick=PICK, common=st.integers(0, 9), tail=st.lists(st.integers(0, 2), max_size=3))
    def add(self, pick: int, common: int, tail: list[int]) -> None:
        name, tokens = self.unused(pick), [1] * common + tail
        table = self.pool.add(name, tokens)
        self.rows[name] = Row(tokens, table.length, table.num_computed)
        self.copy()

    @precondition(lambda self: self.rows)
    @rule(pick=PICK, more=st.integers(0, 6), tokens=st.lists(st.integers(0, 2), min_size=6))
    def step(self, pick: int, more: int, tokens: list[int]) -> None:
        """Reserves, copies what was shared, writes and commits."""
        name = self.live(pick)
        row = self.rows[name]
        length = row.length + more
        try:
            self.pool.reserve(name, length)
        except OutOfBlocks:
            return
        self.copy()
        row.tokens += tokens[: max(0, length - len(row.tokens))]
        row.length = length
        for position in range(row.computed, length):
            self.cache.write(self.pool.table(name).slot(position), row.payload(position))
        row.computed = length
        self.pool.commit(name, row.tokens, length)

    @precondition(lambda self: 0 < len(self.rows) < len(NAMES))
    @rule(pick=PICK, child=PICK)
    def fork(self, pick: int, child: int) -> None:
        row, name = self.rows[self.live(pick)], self.unused(child)
        self.pool.fork(self.live(pick), name)
        self.rows[name] = Row(row.tokens[: row.length], row.length, row.computed)

    @precondition(lambda self: self.rows)
    @rule(pick=PICK, preempt=st.booleans())
    def free(self, pick: int, preempt: bool) -> None:
        name = self.live(pick)
        (self.pool.preempt if preempt else self.pool.free)(name)
        del self.rows[name]

    @rule(limit=LIMITS, budget=BUDGETS)
    def defragment(self, limit: int, budget: int | None) -> None:
        """Moves at most ``limit`` blocks and writes at most ``budget``."""
        per_block = self.cache.swap.bytes_per_block
        max_bytes = None if budget is None else budget * per_block
        defragmenter = OnlineDefragmenter(
            self.pool, self.cache.swap, max_blocks=limit, max_bytes=max_bytes
        )
        before, used = self.pool.highest_used, self.pool.stats().used
        report = defragmenter.defragment()
        assert (report.range_before, report.range_after) == (before, self.pool.highest_used)
        assert report.bytes == (report.moves + report.swaps) * per_block
        assert report.moves <= limit and (max_bytes is None or report.bytes <= max_bytes)
        assert used <= report.range_after <= before
        if limit == 64 and budget is None:
            assert report.range_after == used

    @invariant()
    def nothing_is_lost(self) -> None:
        for name, row in self.rows.items():
            for position in range(row.computed):
                slot = self.pool.table(name).slot(position)
                assert self.cache.read(slot) == row.payload(position)
        assert not any(tensor[: self.cache.size].any() for tensor in self.cache.tensors)

    @invariant()
    def nothing_aliases_and_counts_agree(self) -> None:
        pool = self.pool
        held = Counter(block for name in self.rows for block in pool.table(name).blocks)
        assert {b: int(n) for b, n in enumerate(pool.refcounts) if n} == held
        assert pool.num_used == len(held)
        assert pool.highest_used == max(held, default=0)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(stateful_step_count=40)


@dataclass
class Scheduler:
    """Another allocator, which takes any free block, and the model of its requests."""

    blocks: int
    held: dict[str, list[int]] = field(default_factory=dict)
    payloads: dict[int, int] = field(default_factory=dict)
    written: int = 0

    def free(self, without: set[str]) -> list[int]:
        used = {b for name, row in self.held.items() if name not in without for b in row}
        return [block for block in range(1, self.blocks) if block not in used]


class LogicalBlocksMachine(RuleBasedStateMachine):
    """A scheduler that reports what it did; blocks are tagged."""

    @initialize(blocks=st.integers(2, 14))
    def make(self, blocks: int) -> None:
        self.cache = Cache(blocks, 1)
        self.scheduler = Scheduler(blocks)
        self.blocks = LogicalBlocks(blocks)
        self.defragmenter = OnlineDefragmenter(self.blocks, self.cache.swap, max_waste=0, min_gap=1)

    @rule(
        finished=st.sets(st.sampled_from(NAMES)),
        added=st.dictionaries(st.sampled_from(NAMES), st.lists(PICK, max_size=4), max_size=3),
        shared=st.lists(st.tuples(PICK, PICK), max_size=2),
    )
    def update(
        self, finished: set[str], added: dict[str, list[int]], shared: list[tuple[int, int]]
    ) -> None:
        scheduler = self.scheduler
        finished &= scheduler.held.keys()
        free = scheduler.free(finished)
        rest = {name: row for name, row in scheduler.held.items() if name not in finished}
        new: dict[str, list[int]] = {}
        for name, picks in added.items():
            count = min(len(picks), len(free))
            new[name] = [free.pop(pick % len(free)) for pick in picks[:count]]
        fresh = [block for blocks in new.values() for block in blocks]
        for to, which in shared:
            live = sorted({block for row in rest.values() for block in row})
            name = NAMES[to % len(NAMES)]
            if live and live[which % len(live)] not in rest.get(name, []) + new.get(name, []):
                new.setdefault(name, []).append(live[which % len(live)])
        self.blocks.update(new, sorted(finished))
        scheduler.held = rest
        for name, blocks in new.items():
            scheduler.held.setdefault(name, []).extend(blocks)
        for block in fresh:
            scheduler.written += 1
            scheduler.payloads[block] = scheduler.written
            self.cache.write(self.blocks.resolve(block), scheduler.written)

    @rule(pick=PICK, name=st.sampled_from(NAMES))
    def misuse(self, pick: int, name: str) -> None:
        """Calls that must fail; the invariants say that nothing changed."""
        row = self.scheduler.held.get(name)
        if row is None:
            with pytest.raises(UnknownRequest):
                self.blocks.update({"new": [1]}, [name])
        elif row:
            with pytest.raises(ValueError, match="already"):
                self.blocks.update({"new": [1], name: [row[pick % len(row)]]})
        with pytest.raises(ValueError, match="not in this cache"):
            self.blocks.update({name: [self.scheduler.blocks]}, self.scheduler.held)

    @rule(once=st.booleans())
    def defragment(self, once: bool) -> None:
        while self.defragmenter.is_due:
            assert self.defragmenter.defragment().moves
            if once:
                return
        assert self.blocks.highest_used == self.blocks.num_used

    @invariant()
    def nothing_is_lost_and_counts_agree(self) -> None:
        held = {block for row in self.scheduler.held.values() for block in row}
        where = self.blocks.resolve_all(np.array(sorted(held), dtype=np.int64))
        assert len(set(where.tolist())) == len(held)
        for block, physical in zip(sorted(held), where.tolist(), strict=True):
            assert self.cache.read(physical) == self.scheduler.payloads[block]
            assert self.blocks.unresolve(physical) == block
        assert self.blocks.num_used == len(held)
        highest = self.blocks.highest_used
        assert highest == max(where.tolist(), default=0)
        assert self.defragmenter.waste == ((highest - len(held)) / highest if held else 0)


TestLogicalBlocks = LogicalBlocksMachine.TestCase
TestLogicalBlocks.settings = settings(stateful_step_count=40)


# The soak run


@pytest.fixture(scope="module")
def soak() -> ModuleType:
    path = Path(__file__).resolve().parents[4] / "benchmarks/soak.py"
    spec = importlib.util.spec_from_file_location("soak", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["soak"] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


def test_ten_thousand_random_events_violate_nothing(soak, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["soak.py", "--events", "10000", "--seed", "3"])
    assert soak.main() == 0
    out = capsys.readouterr().out
    assert "events          10000 in" in out
    assert "violations      0" in out


def test_a_soak_run_sees_every_kind_of_event_and_moves_blocks(soak):
    run = soak.Soak(200, 2, seed=1)
    run.run(3000, check_every=100)
    assert all(run.counts[event] > 50 for event in soak.SHARES)
    totals, stats = run.defragmenter.totals, run.pool.stats()
    assert totals.moves > totals.swaps > 100
    assert min(stats.copies, stats.evictions, stats.hit_tokens, run.counts["due"]) > 20


def backends() -> list[object]:
    slow = ("inductor", "aoti", "onnxrt")
    works = [name for name, reason in available_backends().items() if reason is None]
    marks = {name: [pytest.mark.slow] if name in slow else [] for name in works}
    return [pytest.param(name, marks=marks[name]) for name in works]


@pytest.mark.parametrize("backend", backends())
def test_random_events_violate_nothing_in_graphs_of_any_backend(backend, soak):
    run = soak.Soak(60, 2, seed=2, backend=backend, pad_sizes=(4,))
    run.run(400, check_every=20)
    totals = run.defragmenter.totals
    assert totals.moves > totals.swaps > 20
    assert run.pool.stats().copies > 0
