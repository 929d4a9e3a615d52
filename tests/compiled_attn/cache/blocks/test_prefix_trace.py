"""The prefix cache on the Mooncake trace: its ids say which 512-token blocks are equal.

An id stands for a block together with all that comes before it. Every id is given tokens of its
own, so that prompts have equal tokens exactly as far as their ids are equal. What the pool must
find is then counted from the ids alone.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from compiled_attn.cache.blocks import BlockPool
from tests.compiled_attn.cache.blocks.pools import perform_copies

TRACE = Path(__file__).parents[5] / "shared/traces/mooncake_conversation_head.jsonl"
BLOCK = 512


@dataclass
class Row:
    ids: list[int]
    length: int  # tokens of the prompt

    def tokens(self, block: int) -> NDArray[np.int64]:
        """Every id as ``block`` tokens of its own; the last block of the prompt may end early."""
        ids = np.array(self.ids, dtype=np.int64)
        return (ids[:, None] * block + np.arange(block)).reshape(-1)[: self.length]


def trace(count: int) -> list[Row]:
    if not TRACE.exists():
        pytest.skip(f"needs the trace {TRACE}")
    with TRACE.open() as lines:
        rows = [json.loads(line) for line in itertools.islice(lines, count)]
    return [Row(row["hash_ids"], row["prompt_tokens"]) for row in rows]


def unlimited(rows: list[Row], block: int) -> BlockPool:
    return BlockPool(2 + sum(len(row.ids) + 1 for row in rows), block)


def serve(pool: BlockPool, rows: list[Row]) -> Iterator[int]:
    """Compute one prompt after the other; yield how many of its tokens were cached."""
    for number, row in enumerate(rows):
        prompt = row.tokens(pool.block_size)
        yield pool.add(number, prompt).num_cached_tokens
        pool.reserve(number, len(prompt))
        perform_copies(pool)
        pool.commit(number, prompt, len(prompt))
        pool.free(number)


def known_blocks(rows: list[Row]) -> Iterator[int]:
    """How many blocks at the beginning of each prompt have been in one before, by their ids."""
    seen: set[int] = set()
    for row in rows:
        yield len(list(itertools.takewhile(seen.__contains__, row.ids)))
        seen.update(row.ids)


def whole_blocks(rows: list[Row], block: int) -> list[Row]:
    """Prompts of all blocks of their ids and one token more, so that no block is cut off."""
    return [Row([*row.ids, 10**9 + n], len(row.ids) * block + 1) for n, row in enumerate(rows)]


def test_the_block_hit_ratio_is_what_the_ids_of_all_rows_imply() -> None:
    rows = trace(10**6)
    prompts = whole_blocks(rows, block=2)
    pool = unlimited(rows, 2)
    known = list(known_blocks(rows))
    assert [cached / 2 for cached in serve(pool, prompts)] == known
    assert pool.stats().cached == len({one for row in rows for one in row.ids})
    assert pool.stats().evictions == 0
    ratio = sum(known) / sum(len(row.ids) for row in rows)
    assert round(ratio, 2) == 0.35  # as published
    assert pool.stats().hit_tokens / 2 / sum(len(row.ids) for row in rows) == ratio


def test_prompts_of_their_real_length_hit_all_full_blocks_before_their_last_token() -> None:
    """Of the known blocks two kinds cannot be hits: one that no prompt before filled, and the one
    with the last token of the prompt, which is always computed."""
    rows = trace(3000)
    pool = unlimited(rows, BLOCK)
    filled: set[int] = set()
    last, unfilled = 0, 0
    for row, known, cached in zip(rows, known_blocks(rows), serve(pool, rows), strict=True):
        hits = len(list(itertools.takewhile(filled.__contains__, row.ids)))
        with_last = hits * BLOCK >= row.length  # a full last block that is known
        assert cached == (hits - with_last) * BLOCK
        last, unfilled = last + with_last, unfilled + known - hits
        filled.update(row.ids[: row.length // BLOCK])
    stats = pool.stats()
    assert stats.queried_tokens == sum(row.length for row in rows)
    assert stats.hit_tokens / BLOCK == sum(known_blocks(rows)) - last - unfilled
    assert stats.hit_ratio == stats.hit_tokens / stats.queried_tokens
    assert stats.cached == len(filled)
