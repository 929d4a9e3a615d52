"""An index of the tokens in blocks, to find the one that begins with the most of given tokens."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort

import numpy as np

from compiled_attn.arguments import whole

__all__ = ["TOKEN_BYTES", "PartialIndex", "least_partial"]

TOKEN_BYTES = 8

_CHUNK = 512


class SortedKeys:
    """Byte strings in order, in chunks of at most 1024.

    A call compares O(log n) strings and moves at most a chunk of references; the list of chunks,
    n / 512 long, moves only where one is split or used up, that is once in 512 calls or less.
    """

    def __init__(self) -> None:
        self._chunks: list[list[bytes]] = []
        self._firsts: list[bytes] = []

    def add(self, key: bytes) -> None:
        """Put ``key`` in; it was not there."""
        if not self._chunks:
            self._chunks, self._firsts = [[key]], [key]
            return
        at = self._chunk_of(key)
        chunk = self._chunks[at]
        insort(chunk, key)
        self._firsts[at] = chunk[0]
        if len(chunk) > 2 * _CHUNK:
            self._chunks.insert(at + 1, chunk[_CHUNK:])
            self._firsts.insert(at + 1, chunk[_CHUNK])
            del chunk[_CHUNK:]

    def remove(self, key: bytes) -> None:
        """Take ``key`` out; it was there."""
        at = self._chunk_of(key)
        chunk = self._chunks[at]
        del chunk[bisect_left(chunk, key)]
        if chunk:
            self._firsts[at] = chunk[0]
        else:
            del self._chunks[at], self._firsts[at]

    def neighbours(self, key: bytes) -> list[bytes]:
        """Return the last key that is not above ``key`` and the first that is, where there are."""
        if not self._chunks:
            return []
        at = self._chunk_of(key)
        chunk = self._chunks[at]
        above = bisect_right(chunk, key)
        found = chunk[max(0, above - 1) : above + 1]
        if above == len(chunk) and at + 1 < len(self._chunks):
            found.append(self._firsts[at + 1])
        return found

    def __len__(self) -> int:
        return sum(map(len, self._chunks))

    def _chunk_of(self, key: bytes) -> int:
        return max(0, bisect_right(self._firsts, key) - 1)


class PartialIndex:
    """Blocks by the key of their prefix and the tokens in them, full or not.

    All entries are in one order, by prefix and then by tokens. Of all strings in an order the two
    beside a given one have the most leading bytes in common with it, so that the best block is
    found by O(log n) comparisons, however many follow one prefix. A block has at most one entry,
    and an entry one block. Tokens take 8 bytes each.
    """

    def __init__(self) -> None:
        self._keys = SortedKeys()
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    def put(self, parent: bytes, tokens: bytes, block: int) -> None:
        """Let ``block`` be found by ``tokens``, 8 bytes each, that follow the prefix ``parent``.

        Replaces what was known of the block, unless that says the same and more. Where another
        block holds exactly these tokens, that one stays the one that is found.
        """
        key = parent + tokens
        if self._key_of.get(block, b"").startswith(key):
            return
        self.discard(block)
        if key not in self._block_of:
            self._keys.add(key)
            self._block_of[key] = block
            self._key_of[block] = key

    def discard(self, block: int) -> None:
        """Forget ``block``, where it is known."""
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key]
            self._keys.remove(key)

    def hand_over(self, block: int, to: int) -> None:
        """Let ``to``, which holds the same, be found instead of ``block``; 0: nothing is."""
        key = self._key_of.get(block)
        self.discard(block)
        if key is not None and to:
            self.put(key, b"", to)

    def longest(self, parent: bytes, tokens: bytes) -> tuple[int, int]:
        """Return a block that begins with the most of ``tokens`` after ``parent``, and how many.

        ``(0, 0)``, the null block, where none begins with the first of them.
        """
        key = parent + tokens
        best = (0, 0)
        for found in self._keys.neighbours(key):
            if found.startswith(parent):
                count = (_common_bytes(found, key) - len(parent)) // TOKEN_BYTES
                best = max(best, (count, self._block_of[found]))
        return best[1], best[0]

    def __contains__(self, block: int) -> bool:
        return block in self._key_of

    def __len__(self) -> int:
        return len(self._key_of)


def _common_bytes(a: bytes, b: bytes) -> int:
    length = min(len(a), len(b))
    differs = np.frombuffer(a, np.uint8, length) != np.frombuffer(b, np.uint8, length)
    return int(differs.argmax()) if differs.any() else length


def least_partial(block_size: int, given: int | None) -> int:
    """Tokens that a partial hit must save: as given, or a quarter of a block."""
    if given is None:
        return max(1, block_size // 4)
    if whole("min_partial_tokens", given, 1) >= block_size:
        raise ValueError(
            f"expected min_partial_tokens < {block_size}, the block size, got {given}: "
            "a partial hit is shorter than a block"
        )
    return given
