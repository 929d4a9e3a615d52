"""Each rank reads the tokens in its own blocks, and together they read all of them, once."""

from __future__ import annotations

import numpy as np
import pytest

from compiled_attn.step import BatchBuilder, BlockShare, DividedTableLayout, Request, RequestTable

SIZE = 4


def shares(count: int) -> list[BlockShare]:
    return [BlockShare(rank, count) for rank in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_block_lies_at_a_place_of_one_rank_alone(count):
    blocks = np.arange(1, shares(count)[0].of_all(6))
    local = [(s.process_rank, int(at)) for s in shares(count) for at in s.local(blocks) if at]
    assert sorted(local) == [(rank, at) for rank in range(count) for at in range(1, 6)]
    assert not any(share.has(np.array([0]))[0] for share in shares(count))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_ranks_read_every_earlier_token_once_and_in_order(count):
    chance = np.random.default_rng(count)
    for _ in range(30):
        of_all = shares(count)[0].of_all(8)
        order = iter(chance.permutation(np.arange(1, of_all)))
        sizes = [(int(chance.integers(0, 9)), int(chance.integers(1, 6))) for _ in range(2)]
        tables = [[next(order) for _ in range(-(-sum(each) // SIZE))] for each in sizes]
        requests = [
            Request([1] * new, context, table)
            for (context, new), table in zip(sizes, tables, strict=True)
        ]
        rows = BatchBuilder(of_all, SIZE).rows_of(requests)
        found = [set() for _ in requests]
        written = set()
        for share in shares(count):
            plan = DividedTableLayout(of_all, SIZE, 6, share, "g").plan(rows)
            assert plan.need == {"tokens": sum(new for _, new in sizes), "requests": 2}
            batch = plan.fill({"tokens": 12, "requests": 4})
            assert batch.seq_lens[2:].tolist() == [0, 0] and batch.block_tables.shape == (4, 6)
            for at, length in enumerate(batch.seq_lens[:2].tolist()):
                local = batch.block_tables[at, : -(-length // SIZE)].tolist()
                blocks = [(block - 1) * count + share.process_rank + 1 for block in local]
                numbers = [tables[at].index(block) for block in blocks]
                assert numbers == sorted(numbers)
                seen = [number * SIZE + offset for number in numbers for offset in range(SIZE)]
                assert not found[at] & {*seen[:length]}
                found[at] |= {*seen[:length]}
            own = batch.slot_mapping[: len(rows.slots)]
            own_rows = [i for i, slot in enumerate(own.tolist()) if slot]
            assert all(share.has(rows.slots[i : i + 1] // SIZE)[0] for i in own_rows)
            written |= {*own_rows}
        assert found == [{*range(context)} for context, _ in sizes]
        assert written == {*range(len(rows.slots))}  # no slot of a request is the null block's


def test_rows_of_a_table_that_is_kept_are_read_like_requests():
    table = RequestTable(3, 4, in_place=True)
    for name, blocks in (("a", [1, 2, 3]), ("b", [5])):
        table.add(name, blocks)
    layout = DividedTableLayout(8, SIZE, 4, BlockShare(1, 2), "g")
    rows = BatchBuilder(8, SIZE).rows(table, [0, 1], [9, 2], [1, 1], [7, 8])
    batch = layout.plan(rows).fill({"tokens": 2, "requests": 3})
    assert batch.block_tables.tolist() == [[1, 0, 0, 0], [0] * 4, [0] * 4]
    assert batch.seq_lens.tolist() == [4, 0, 0]
    assert batch.slot_mapping.tolist() == [0, 0]


def test_metadata_says_who_the_ranks_are():
    layout = DividedTableLayout(8, SIZE, 4, BlockShare(1, 2), "g").over(5, 2, 3)
    metadata = layout.metadata(layout.padding({"tokens": 2, "requests": 1}), 2)
    assert metadata.ranks == ("g", 2) and metadata.block_tables.shape == (1, 3)
