from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compiled_attn.blocks import BlockPool, PrefixIndex

TRACE = Path(__file__).parents[3] / "shared/traces/mooncake_conversation_head.jsonl"


def fill(index: PrefixIndex, tokens: list[int], first_block: int, salt: str | None = None) -> None:
    key = index.root(salt)
    for number in range(len(tokens) // index.block_size):
        key = index.next_key(key, tokens, number * index.block_size)
        index.insert(key, first_block + number)


def test_the_longest_prefix_of_full_blocks_is_found() -> None:
    index = PrefixIndex(block_size=2)
    fill(index, [1, 2, 3, 4, 5, 6], first_block=10)
    assert index.match([1, 2, 3, 4, 5, 6]) == [10, 11, 12]
    assert index.match([1, 2, 3, 4, 5]) == [10, 11]
    assert index.match([1, 2, 3, 9, 5, 6]) == [10]
    assert index.match([2, 1, 3, 4, 5, 6]) == index.match([1]) == index.match([]) == []


def test_equal_blocks_after_different_parents_are_different() -> None:
    index = PrefixIndex(block_size=2)
    fill(index, [1, 2, 7, 7], first_block=1)
    fill(index, [3, 4, 7, 7], first_block=5)
    assert index.match([1, 2, 7, 7]) == [1, 2]
    assert index.match([3, 4, 7, 7]) == [5, 6]
    assert index.match([7, 7]) == []


def test_the_key_depends_on_the_tokens_and_not_on_their_container() -> None:
    index = PrefixIndex(block_size=3)
    root = index.root()
    forms: list[Any] = [
        [1, 2, 3],
        (1, 2, 3),
        range(1, 4),
        np.array([1, 2, 3]),
        np.array([1, 2, 3], dtype=np.int32),
        np.array([1, 9, 2, 9, 3])[::2],
        [np.int64(1), 2, np.uint8(3)],
    ]
    assert len({index.next_key(root, tokens) for tokens in forms}) == 1
    assert index.next_key(root, [0, 1, 2, 3], start=1) == index.next_key(root, [1, 2, 3])


def test_tokens_that_a_weak_hash_confuses_have_different_keys() -> None:
    index = PrefixIndex(block_size=2)
    values = (
        -2,
        -1,
        0,
        1,
        256,
        2**31,
        2**61 - 1,
        2**62,
    )  # hash(-1) == hash(-2), hash(2**61-1) == 0
    keys = {index.next_key(index.root(), pair) for pair in itertools.product(values, repeat=2)}
    assert len(keys) == len(values) ** 2


def test_salts_keep_tenants_apart() -> None:
    index = PrefixIndex(block_size=1)
    salts = (None, "", b"", "none", "a", b"a", "str:a")
    assert len({index.root(salt) for salt in salts}) == len(salts)
    for block, salt in enumerate(salts, start=1):
        index.insert(index.next_key(index.root(salt), [5]), block)
    assert [index.match([5], salt) for salt in salts] == [[block] for block in range(1, 8)]


def test_a_taken_key_or_block_is_left_as_it_is() -> None:
    index = PrefixIndex(block_size=1)
    one, two = (index.next_key(index.root(), [token]) for token in (1, 2))
    assert index.insert(one, 4)
    assert not index.insert(one, 5)
    assert not index.insert(two, 4)
    assert (len(index), 4 in index, 5 in index, index.key_of(4)) == (1, True, False, one)


def test_a_removed_block_is_not_found_but_what_follows_it_is_once_it_returns() -> None:
    index = PrefixIndex(block_size=1)
    fill(index, [1, 2, 3], first_block=1)
    index.remove(2)
    assert index.match([1, 2, 3]) == [1]
    index.insert(index.next_key(index.key_of(1), [2]), 9)
    assert index.match([1, 2, 3]) == [1, 9, 3]


def test_a_block_that_is_not_indexed_is_named() -> None:
    index = PrefixIndex(block_size=1)
    for call in (index.remove, index.key_of):
        with pytest.raises(ValueError, match="expected an indexed block, got 7"):
            call(7)


@pytest.mark.parametrize("tokens", [[1, 2.0], ["a", "b"], [2**63, 0], np.zeros(2), [None, 1]])
def test_tokens_that_are_no_integers_are_refused(tokens: Any) -> None:
    index = PrefixIndex(block_size=2)
    with pytest.raises(TypeError, match="integer tokens"):
        index.match(tokens)


def test_a_block_that_is_not_full_has_no_key() -> None:
    index = PrefixIndex(block_size=4)
    with pytest.raises(ValueError, match="full block of 4 tokens from 4 on, got 2"):
        index.next_key(index.root(), [1, 2, 3, 4, 5, 6], start=4)


# The Mooncake trace: one hash id per 512-token block of the prompt, equal ids for equal prefixes.


def trace_rows(count: int) -> list[dict[str, Any]]:
    if not TRACE.exists():
        pytest.skip(f"needs the trace {TRACE}")
    with TRACE.open() as lines:
        return [json.loads(line) for line in itertools.islice(lines, count)]


def prompt_of(row: dict[str, Any], block_size: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """``block_size >= 2`` tokens per hash id, then one token that fills no block."""
    ids = np.array(row["hash_ids"], dtype=np.int64)
    tokens = ids[:, None] * block_size + np.arange(block_size)
    return np.append(tokens.reshape(-1), -1)


def check_hit_ratio(rows: list[dict[str, Any]], block_size: int) -> float:
    """Serve the rows one after another from an unlimited pool; return its block hit ratio.

    Accounting: a block counts as hit where its id and all ids before it in the row were seen in
    earlier rows. The last token of a prompt is never a hit, so every prompt is given one token
    beyond its blocks; otherwise the last block of a repeated prompt could not be found.
    """
    pool = BlockPool(1 + sum(len(row["hash_ids"]) + 1 for row in rows), block_size)
    seen: set[int] = set()
    expected = 0
    for number, row in enumerate(rows):
        known = len(list(itertools.takewhile(seen.__contains__, row["hash_ids"])))
        prompt = prompt_of(row, block_size)
        table = pool.add(number, prompt)
        assert table.num_cached_tokens == known * block_size
        pool.reserve(number, len(prompt))
        pool.commit(number, prompt, len(prompt))
        pool.free(number)
        expected += known
        seen.update(row["hash_ids"])
    assert pool.stats().hit_tokens == expected * block_size
    assert pool.stats().evictions == 0
    assert pool.stats().cached == len(seen)
    return expected / sum(len(row["hash_ids"]) for row in rows)


def test_the_hit_ratio_of_the_mooncake_trace_is_what_its_hash_ids_imply() -> None:
    check_hit_ratio(trace_rows(1000), block_size=4)


@pytest.mark.slow
def test_the_hit_ratio_of_all_of_the_mooncake_trace_is_the_published_one() -> None:
    assert round(check_hit_ratio(trace_rows(10**6), block_size=2), 2) == 0.35
