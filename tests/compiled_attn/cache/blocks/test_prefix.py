from __future__ import annotations

import itertools
import random
from hashlib import blake2b
from typing import Any

import numpy as np
import pytest

from compiled_attn.cache.blocks import BlockPool, PrefixIndex
from compiled_attn.cache.blocks.partial_hits import PartialIndex, SortedKeys
from compiled_attn.cache.blocks.prefix import token_bytes
from tests.compiled_attn.work import lines_run


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
    assert (len(index), 4 in index, 5 in index, index._key_of[4]) == (1, True, False, one)


def test_a_removed_block_is_not_found_but_what_follows_it_is_once_it_returns() -> None:
    index = PrefixIndex(block_size=1)
    fill(index, [1, 2, 3], first_block=1)
    index.remove(2)
    assert index.match([1, 2, 3]) == [1]
    index.insert(index.next_key(index._key_of[1], [2]), 9)
    assert index.match([1, 2, 3]) == [1, 9, 3]


def test_a_block_that_is_not_indexed_is_named() -> None:
    index = PrefixIndex(block_size=1)
    with pytest.raises(ValueError, match="expected an indexed block, got 7"):
        index.remove(7)


@pytest.mark.parametrize("tokens", [[1, 2.0], ["a", "b"], [2**63, 0], np.zeros(2), [None, 1]])
def test_tokens_that_are_no_integers_are_refused(tokens: Any) -> None:
    index = PrefixIndex(block_size=2)
    with pytest.raises(TypeError, match="integer tokens"):
        index.match(tokens)


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
    drawn = [PrefixIndex(block_size=1) for _ in range(3)]
    drawn += [BlockPool(num_blocks=4, block_size=1)._index for _ in range(3)]
    assert len({index.root() for index in drawn}) == 6
    parent = bytes(16)
    assert len({index.next_key(parent, [1]) for index in drawn}) == 6
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


@pytest.mark.parametrize("min_partial", [None, 1])
def test_of_two_thousand_parents_with_the_same_next_block_no_two_meet(
    min_partial: int | None,
) -> None:
    # A parent's key cut to one byte has 256 values, so that two of these would have to be equal;
    # cut to two bytes, 2000 parents make 30 pairs that are.
    index = PrefixIndex(2, min_partial, key=b"fixed")
    parents = [[first, second] for first in range(50) for second in range(40)]
    for number, parent in enumerate(parents):
        key = index.put(index.root(), token_bytes(parent), 1 + 2 * number)
        assert index.match([*parent, 7, 7]) == [1 + 2 * number]
        index.put(key, token_bytes([7, 7]), 2 + 2 * number)
    for number, parent in enumerate(parents):
        assert index.match([*parent, 7, 7]) == [1 + 2 * number, 2 + 2 * number]
        if min_partial:
            assert index.longest([*parent, 7, 8])[2:] == (2 + 2 * number, 1)


def test_of_two_thousand_salts_with_the_same_first_block_no_two_meet() -> None:
    index = PrefixIndex(1, key=b"fixed")
    for block in range(1, 2001):
        assert index.match([7], f"tenant {block}") == []
        index.put(index.root(f"tenant {block}"), token_bytes([7]), block)
    assert all(index.match([7], f"tenant {block}") == [block] for block in range(1, 2001))


# Twins: blocks with the same content


def twins() -> tuple[PrefixIndex, bytes]:
    index = PrefixIndex(block_size=1)
    key = index.next_key(index.root(), [5])
    assert [index.insert(key, block) for block in (3, 1, 2)] == [True, False, False]
    return index, key


def test_the_oldest_twin_is_found_when_the_first_block_is_removed() -> None:
    index, key = twins()
    found = []
    while 3 in index or 1 in index or 2 in index:
        found += index.match([5])
        index.remove(found[-1])
    assert found == [3, 1, 2]
    assert index.match([5]) == [] and len(index) == 0
    assert index.insert(key, 3)


def test_a_twin_that_is_removed_is_not_found_later() -> None:
    index, _ = twins()
    assert [index.remove_twin(block) for block in (1, 1, 3, 9)] == [3, 0, 0, 0]
    index.remove(3)
    assert index.match([5]) == [2]


def test_a_twin_is_found_in_part_as_well_when_its_turn_comes() -> None:
    index = PrefixIndex(block_size=4, min_partial=1)
    for block in (7, 8):
        index.put(index.root(), token_bytes([1, 2, 3, 4]), block)
    assert index.longest([1, 2, 9])[2:] == (7, 2)
    index.remove(7)
    assert index.longest([1, 2, 9])[2:] == (8, 2)
    assert index.match([1, 2, 3, 4]) == [8]
    index.remove(8)
    assert index.longest([1, 2, 9])[2:] == (0, 0)


# Blocks found in part


def test_the_longest_match_goes_on_into_a_part_of_the_next_block() -> None:
    index = PrefixIndex(block_size=4, min_partial=2)
    key = index.put(index.root(), token_bytes([1, 2, 3, 4]), 10)
    index.put(key, token_bytes([5, 6, 7, 8]), 11)
    index.put(key, token_bytes([5, 9, 9]), 12)
    assert index.longest([1, 2, 3, 4, 5, 6, 7]) == ([10], key, 11, 3)
    assert index.longest([1, 2, 3, 4, 5, 9, 9, 9, 9]) == ([10], key, 12, 3)
    assert index.longest([1, 2, 3, 4, 5, 6]) == ([10], key, 11, 2)
    assert index.longest([1, 2, 3, 4, 5, 1]) == ([10], key, 0, 0)  # one token is not worth it
    assert index.longest([5, 6, 7]) == ([], index.root(), 0, 0)  # after another parent
    assert index.longest([1, 2, 3, 4, 5, 6, 7, 8])[0] == [10, 11]


def test_a_part_is_replaced_when_its_block_gains_tokens_and_never_by_less() -> None:
    index = PrefixIndex(block_size=4, min_partial=1)
    for tokens in ([1], [1, 2, 3], [1, 2]):
        assert index.put(index.root(), token_bytes(tokens), 5) == index.root()
    assert index.longest([1, 2, 3, 4])[2:] == (5, 3)
    key = index.put(index.root(), token_bytes([1, 2, 3, 4]), 5)
    index.put(index.root(), token_bytes([1, 2]), 5)
    assert (index.match([1, 2, 3, 4]), index._key_of[5]) == ([5], key)
    assert index.longest([1, 2, 3, 9])[2:] == (5, 3)


def test_without_partial_matches_no_tokens_are_kept() -> None:
    index = PrefixIndex(block_size=4)
    index.put(index.root(), token_bytes([1, 2, 3, 4]), 5)
    assert len(index._partial) == 0
    assert index.longest([1, 2, 3, 9])[2:] == (0, 0)


def common(a: list[int], b: list[int]) -> int:
    return [*(x == y for x, y in zip(a, b, strict=False)), False].index(False)


def test_no_block_begins_with_more_tokens_than_the_one_that_is_found() -> None:
    rng = random.Random(1)
    index, model = PartialIndex(), dict[int, tuple[bytes, list[int]]]()
    parents = [bytes([n]) * 16 for n in (0, 7, 255)]
    for _ in range(4000):
        parent, block = rng.choice(parents), rng.randrange(1, 300)
        tokens = [rng.choice((-1, 0, 1, 2**40)) for _ in range(rng.randrange(1, 7))]
        if rng.random() < 0.3:
            index.discard(block)
            model.pop(block, None)
        elif block not in model and (parent, tokens) not in model.values():
            index.put(parent, token_bytes(tokens), block)
            model[block] = parent, tokens
        found, count = index.longest(parent, token_bytes(tokens))
        rivals = [common(other, tokens) for above, other in model.values() if above == parent]
        assert count == max(rivals, default=0)
        assert not count or (model[found][0] == parent and common(model[found][1], tokens) == count)
        assert len(index) == len(model)


def test_sorted_keys_stay_in_order_in_chunks_of_bounded_size() -> None:
    rng = random.Random(2)
    keys, model = SortedKeys(), dict[bytes, None]()
    for size, grow in ((6000, True), (100, False), (3000, True), (0, False)):
        while len(model) != size:
            key = rng.randbytes(3) if grow else next(iter(model))
            if grow and key not in model:
                keys.add(key)
                model[key] = None
            elif not grow:
                keys.remove(key)
                del model[key]
        assert [key for chunk in keys._chunks for key in chunk] == sorted(model)
        assert keys._firsts == [chunk[0] for chunk in keys._chunks]
        assert max(map(len, keys._chunks), default=0) <= 1024
        assert len(keys) == len(model)
        probe = rng.randbytes(3)
        below = sorted(key for key in model if key <= probe)
        above = sorted(key for key in model if key > probe)
        assert keys.neighbours(probe) == below[-1:] + above[:1]


def test_finding_a_part_costs_the_same_among_a_hundred_thousand_siblings() -> None:
    small, large = PartialIndex(), PartialIndex()
    root = b"r" * 16
    for index, count in ((small, 1000), (large, 100_000)):
        for block in range(1, count + 1):
            index.put(root, token_bytes([block * 7919 % 1_000_003, block, 5, 6]), block)
    asked = token_bytes([500 * 7919 % 1_000_003, 500, 9])
    assert small.longest(root, asked) == large.longest(root, asked) == (500, 2)
    work = [lines_run(lambda i=index: i.longest(root, asked)) for index in (small, large)]
    assert work[1] <= work[0] + 5
    put = [lines_run(lambda i=i: i.put(root, token_bytes([1, 2, 3]), 999)) for i in (small, large)]
    assert put[1] <= put[0] + 5
