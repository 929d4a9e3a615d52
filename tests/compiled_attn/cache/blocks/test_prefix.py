from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np
import pytest

from compiled_attn.cache.blocks import BlockPool, PrefixIndex
from compiled_attn.cache.blocks.prefix import token_bytes


def match(index: PrefixIndex, tokens: Any, salt: str | bytes | None = None) -> list[int]:
    return index.match(tokens, salt)[0]


def fill(index: PrefixIndex, tokens: list[int], first_block: int, salt: str | None = None) -> None:
    key = index.root(salt)
    for number in range(len(tokens) // index.block_size):
        key = index.next_key(key, tokens, number * index.block_size)
        index.insert(key, first_block + number)


def test_the_longest_prefix_of_full_blocks_is_found() -> None:
    index = PrefixIndex(block_size=2)
    fill(index, [1, 2, 3, 4, 5, 6], first_block=10)
    assert match(index, [1, 2, 3, 4, 5, 6]) == [10, 11, 12]
    assert match(index, [1, 2, 3, 4, 5]) == [10, 11]
    assert match(index, [1, 2, 3, 9, 5, 6]) == [10]
    assert match(index, [2, 1, 3, 4, 5, 6]) == match(index, [1]) == match(index, []) == []


def test_equal_blocks_after_different_parents_are_different() -> None:
    index = PrefixIndex(block_size=2)
    fill(index, [1, 2, 7, 7], first_block=1)
    fill(index, [3, 4, 7, 7], first_block=5)
    assert match(index, [1, 2, 7, 7]) == [1, 2]
    assert match(index, [3, 4, 7, 7]) == [5, 6]
    assert match(index, [7, 7]) == []


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


def test_salts_keep_tenants_apart() -> None:
    index = PrefixIndex(block_size=1)
    salts = (None, "", b"", "none", "a", b"a", "str:a")
    assert len({index.root(salt) for salt in salts}) == len(salts)
    for block, salt in enumerate(salts, start=1):
        index.insert(index.next_key(index.root(salt), [5]), block)
    assert [match(index, [5], salt) for salt in salts] == [[block] for block in range(1, 8)]


def test_a_taken_key_or_block_is_left_as_it_is() -> None:
    index = PrefixIndex(block_size=1)
    one, two = (index.next_key(index.root(), [token]) for token in (1, 2))
    assert index.insert(one, 4)
    assert not index.insert(one, 5)
    assert not index.insert(two, 4)
    assert (len(index), index.block(one), index.key(4), index.key(5)) == (1, 4, one, one)
    with pytest.raises(KeyError):
        index.block(two)


def test_a_removed_block_is_not_found_but_what_follows_it_is_once_it_returns() -> None:
    index = PrefixIndex(block_size=1)
    fill(index, [1, 2, 3], first_block=1)
    index.remove(2)
    assert match(index, [1, 2, 3]) == [1]
    index.insert(index.next_key(index.key(1), [2]), 9)
    assert match(index, [1, 2, 3]) == [1, 9, 3]


@pytest.mark.parametrize("tokens", [[1, 2.0], ["a", "b"], [2**63, 0], np.zeros(2), [None, 1]])
def test_tokens_that_are_no_integers_are_refused(tokens: Any) -> None:
    index = PrefixIndex(block_size=2)
    with pytest.raises(TypeError, match="integer tokens"):
        match(index, tokens)


def test_a_block_that_is_not_full_has_no_key() -> None:
    index = PrefixIndex(block_size=4)
    with pytest.raises(ValueError, match="full block of 4 tokens from 4 on, got 2"):
        index.next_key(index.root(), [1, 2, 3, 4, 5, 6], start=4)


# Keys


def test_digests_are_those_of_keyed_blake2b_and_the_same_in_every_process() -> None:
    index = PrefixIndex(block_size=2, key=bytes(range(32)))
    salted = blake2b(b"str:x", digest_size=16, key=bytes(range(32)), person=b"root").digest()
    assert index.root("x") == salted
    tokens = (5).to_bytes(8, "little") + (6).to_bytes(8, "little")
    expected = blake2b(salted + tokens, digest_size=16, key=bytes(range(32))).digest()
    assert index.next_key(index.root("x"), [5, 6]) == expected
    assert expected.hex() == "d1832cc260ff95310503c6224aa1b2c0"
    assert index.put(index.root("x"), token_bytes([5, 6]), 1) == expected


def test_nobody_else_can_compute_a_digest_unless_a_key_is_given() -> None:
    random = [PrefixIndex(block_size=1) for _ in range(3)]
    random += [BlockPool(num_blocks=4, block_size=1)._index for _ in range(3)]
    assert len({index.root() for index in random}) == 6
    parent = bytes(16)
    assert len({index.next_key(parent, [1]) for index in random}) == 6
    given = [PrefixIndex(1, key=b"k"), BlockPool(4, 1, key=b"k")._index]
    assert given[0].root("a") == given[1].root("a") != PrefixIndex(1, key=b"l").root("a")


@pytest.mark.parametrize(
    ("key", "error", "message"),
    [
        ("text", TypeError, "expected a key of bytes or None, got str"),
        (bytearray(8), TypeError, "got bytearray"),
        (b"", ValueError, "expected a key of 1 to 64 bytes, got 0"),
        (bytes(65), ValueError, "got 65"),
    ],
)
def test_a_key_that_cannot_be_used_is_refused(key: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        PrefixIndex(1, key=key)
    with pytest.raises(error, match=message):
        BlockPool(2, 1, key=key)


# Duplicates: blocks with the same content


def duplicates() -> tuple[PrefixIndex, bytes]:
    index = PrefixIndex(block_size=1)
    key = index.next_key(index.root(), [5])
    assert [index.insert(key, block) for block in (3, 1, 2)] == [True, False, False]
    return index, key


def test_the_oldest_duplicate_is_found_when_the_first_block_is_removed() -> None:
    index, key = duplicates()
    found = []
    while len(index):
        found += match(index, [5])
        index.remove(found[-1])
    assert found == [3, 1, 2]
    assert match(index, [5]) == [] and len(index) == 0
    assert index.insert(key, 3)


def test_a_duplicate_that_is_removed_is_not_found_later() -> None:
    index, _ = duplicates()
    for block in (1, 1, 9):
        index.remove(block)
        assert match(index, [5]) == [3]
    index.remove(3)
    assert match(index, [5]) == [2]


def test_renamed_blocks_are_found_and_removed_under_their_new_ids() -> None:
    index, key = duplicates()
    other = index.next_key(index.root(), [6])
    index.insert(other, 7)
    index.rename({3: 7, 7: 3, 1: 9, 9: 1})
    assert (match(index, [5]), match(index, [6])) == ([7], [3])
    assert [index.key(block) for block in (7, 9, 2, 3, 1)] == [key, key, key, other, None]
    index.remove(7)
    assert match(index, [5]) == [9]  # the oldest duplicate, renamed
    index.rename({9: 2, 2: 9})
    assert match(index, [5]) == [2]
