"""Finds blocks by content: a full block is keyed by the hash of all tokens up to its end."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from compiled_attn.blocks.errors import whole

__all__ = ["PrefixIndex", "Salt", "Tokens"]

Tokens: TypeAlias = Sequence[int] | NDArray[np.integer[Any]]
Salt: TypeAlias = str | bytes | None

_DIGEST_BYTES = 16


class PrefixIndex:
    """Content address of full blocks: ``key(block) = hash(key(parent), tokens of the block)``.

    The chain starts from a root key made of the salt, so that equal tokens under different salts
    (tenants, adapters) never meet. Keys are 128-bit BLAKE2b digests: equal keys are taken for equal
    prefixes. One key has at most one block and one block at most one key. All operations are O(1)
    per block.

    Args:
        block_size: tokens in a full block, at least 1.

    Example::

        index = PrefixIndex(block_size=2)
        key = index.next_key(index.root(), [5, 6])
        index.insert(key, 3)
        index.match([5, 6, 7])  # [3]
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = whole("block_size", block_size, 1)
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    def root(self, salt: Salt = None) -> bytes:
        """Return the key of the empty prefix under ``salt``; another type is a ``TypeError``."""
        match salt:
            case None:
                data = b"none"
            case str():
                data = b"str:" + salt.encode()
            case bytes():
                data = b"bytes:" + salt
            case _:
                raise TypeError(f"expected salt as str, bytes or None, got {salt!r}: pass its repr")
        return blake2b(data, digest_size=_DIGEST_BYTES, person=b"root").digest()

    def next_key(self, parent: bytes, tokens: Tokens, start: int = 0) -> bytes:
        """Return the key of block ``tokens[start : start + block_size]`` that follows ``parent``.

        Raises ``TypeError`` where a token is not an integer, ``ValueError`` where the block would
        not be full.
        """
        block = tokens[start : start + self.block_size]
        if len(block) < self.block_size:
            raise ValueError(
                f"expected a full block of {self.block_size} tokens from {start} on, "
                f"got {len(block)}: only full blocks have a key"
            )
        return blake2b(parent + _token_bytes(block), digest_size=_DIGEST_BYTES).digest()

    def match(self, tokens: Tokens, salt: Salt = None) -> list[int]:
        """Return the blocks of the longest indexed prefix of ``tokens``, full blocks only.

        Args:
            tokens: token ids, ``[n]`` of any integer type.
            salt: the extra key under which they were inserted.
        """
        blocks: list[int] = []
        key = self.root(salt)
        check_tokens(tokens)
        for start in range(0, len(tokens) - self.block_size + 1, self.block_size):
            key = self.next_key(key, tokens, start)
            block = self._block_of.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def insert(self, key: bytes, block: int) -> bool:
        """Make ``block`` findable under ``key``; return False, unchanged, where either is taken."""
        if key in self._block_of or block in self._key_of:
            return False
        self._block_of[key] = block
        self._key_of[block] = key
        return True

    def remove(self, block: int) -> None:
        """Forget ``block``. Raises ``ValueError`` where it has no key."""
        if block not in self._key_of:
            raise ValueError(f"expected an indexed block, got {block}: insert it first")
        del self._block_of[self._key_of.pop(block)]

    def key_of(self, block: int) -> bytes:
        """Return the key of ``block``. Raises ``ValueError`` where it has none."""
        if block not in self._key_of:
            raise ValueError(f"expected an indexed block, got {block}: insert it first")
        return self._key_of[block]

    def __contains__(self, block: int) -> bool:
        return block in self._key_of

    def __len__(self) -> int:
        return len(self._key_of)


def check_tokens(tokens: Tokens) -> None:
    """Raise ``TypeError`` or ``ValueError`` where an array cannot be one sequence of token ids."""
    if not isinstance(tokens, np.ndarray):
        return
    if tokens.ndim != 1:
        raise ValueError(
            f"expected tokens of shape [n], got {list(tokens.shape)}: pass one sequence at a time"
        )
    if tokens.dtype.kind not in "iu":
        raise TypeError(
            f"expected integer tokens, got {tokens.dtype}: pass token ids, not embeddings"
        )


def _token_bytes(tokens: Tokens) -> bytes:
    if isinstance(tokens, np.ndarray):
        check_tokens(tokens)
        return np.ascontiguousarray(tokens, dtype=np.int64).tobytes()
    try:
        return array("q", list(tokens)).tobytes()
    except (TypeError, OverflowError) as error:
        raise TypeError(f"expected 64-bit integer tokens, got {list(tokens)}: {error}") from None
