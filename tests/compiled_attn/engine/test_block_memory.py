"""Block tables follow the pool, whatever happens to the requests between two steps."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiled_attn.cache.blocks import BlockPool, OutOfBlocks, UnknownRequest
from compiled_attn.engine.block_memory import BlockMemory, StepTables
from compiled_attn.step import RequestTable, TableLayout
from compiled_attn.step.parts_layout import PartsLayout
from tests.compiled_attn.engine.counting import CONFIG, Counting

EVENT = st.tuples(st.sampled_from(["add", "grow", "fork", "free", "release"]), st.integers(0, 5))


@given(steps=st.lists(st.lists(EVENT, max_size=6), min_size=1, max_size=12), seed=st.integers(0, 9))
def test_after_any_events_the_rows_are_the_blocks_of_the_pool(steps, seed):
    pool = BlockPool(24, 4, window=4 if seed % 2 else None)
    tables = StepTables(pool, max_requests=6, max_blocks=20)
    for number, events in enumerate(steps):
        for kind, name in events:
            with contextlib.suppress(OutOfBlocks, ValueError, KeyError):
                _happen(pool, kind, name, seed)
        if number % 3 == 2 and (pairs := pool.compaction(2)):
            pool.exchange(pairs)
        table = tables.of(pool.requests)
        for request in pool.requests:
            row, blocks = table.row(request), pool.table(request).blocks
            assert table.blocks[row, : table.lengths[row]].tolist() == blocks


def _happen(pool: BlockPool, kind: str, name: int, seed: int) -> None:
    if kind == "add":
        prompt = [(seed * n) % 3 for n in range(4 + 3 * name)]
        pool.add(name, prompt)
        pool.reserve(name, len(prompt))
        pool.copied(pool.pending_copies())
        pool.commit(name, prompt, len(prompt))
    elif kind == "release":
        pool.release_before(name, pool.table(name).num_computed - 3)
    elif kind == "grow":
        pool.append(name, 3)
    elif kind == "fork":
        pool.fork(name, (name + 1) % 6)
    else:
        pool.free(name)


def test_a_request_that_is_not_in_the_pool_has_no_row():
    with pytest.raises(UnknownRequest):
        StepTables(BlockPool(8, 4), 2, 4).of(["nobody"])


def test_only_new_blocks_are_written(monkeypatch):
    pool = BlockPool(30, 4)
    for name in range(3):
        pool.add(name)
        pool.reserve(name, 20)
    tables, written = StepTables(pool, 6, 10), []
    write = RequestTable.write
    monkeypatch.setattr(
        RequestTable, "write", lambda *args: written.append(len(args[-1])) or write(*args)
    )
    tables.of(range(3))
    pool.append(1, 1)
    tables.of(range(3))
    tables.of(range(3))
    assert [count for count in written if count] == [5, 5, 5, 1]


@pytest.mark.parametrize(
    ("layout", "configured", "waste"),
    [
        (PartsLayout, None, 0.25),
        (TableLayout, None, None),
        (TableLayout, 0.5, 0.5),
        (PartsLayout, 1, None),
    ],
)
def test_blocks_are_defragmented_where_a_step_reads_their_range(layout, configured, waste):
    executor = Counting()
    executor.sizing = replace(executor.sizing, layout=layout(20, 4))
    found = BlockMemory(executor, replace(CONFIG, defrag_waste=configured)).defragmenter
    assert (found.max_waste if found else None) == waste
