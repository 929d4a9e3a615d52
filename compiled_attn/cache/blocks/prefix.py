"""An index of full blocks by the hash of all tokens up to their end."""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from compiled_attn.arguments import whole
from compiled_attn.cache.blocks.window import blocks_before

__all__ = ["TOKEN_BYTES", "PrefixIndex", "PromptKeys", "Salt", "Tokens"]

Tokens: TypeAlias = Sequence[int] | NDArray[np.integer[Any]]
Salt: TypeAlias = str | bytes | None

TOKEN_BYTES = 8

_DIGEST_BYTES = 16


class PromptKeys:
    """The keys of the full blocks of a prompt, each hashed when it is first needed.

    Blocks are looked up on every call, so a result is never out of date.

    Args:
        index: the index whose hash is used.
        tokens: ``[n]`` token ids, which must not change.
        salt: extra key.
    """

    def __init__(self, index: PrefixIndex, tokens: Tokens, salt: Salt = None) -> None:
        check_tokens(tokens)
        self.index, self.tokens = index, tokens
        self._keys = [index.root(salt)]

    def match(self, block_of: Mapping[bytes, int], limit: int) -> tuple[list[int], bytes]:
        """Returns the blocks of the longest prefix of ``tokens[:limit]``, and the key after it."""
        blocks: list[int] = []
        keys, size = self._keys, self.index.block_size
        for number in range(limit // size):
            if number + 1 == len(keys):
                keys.append(self.index.next_key(keys[number], self.tokens, number * size))
            block = block_of.get(keys[number + 1])
            if block is None:
                break
            blocks.append(block)
        return blocks, keys[len(blocks)]

    def match_window(
        self, block_of: Mapping[bytes, int], limit: int, window: int
    ) -> tuple[list[int], bytes]:
        """Returns what `match` does if only the last ``window`` tokens are read: the longest prefix
        whose blocks of those tokens are found, with null block 0 for all earlier ones.
        """
        keys, size = self._keys, self.index.block_size
        for number in range(len(keys) - 1, limit // size):
            keys.append(self.index.next_key(keys[number], self.tokens, number * size))
        found = [block_of.get(key, 0) for key in keys[1 : limit // size + 1]]
        end = in_row = 0
        for count, block in enumerate(found, 1):
            in_row = in_row + 1 if block else 0
            if in_row >= count - blocks_before(count * size, window, size):
                end = count
        first = blocks_before(end * size, window, size)
        return [0] * first + found[first:end], keys[end]

    def keys(self, count: int) -> list[bytes]:
        """Returns the keys of the first ``count`` blocks, which a match has found or skipped."""
        return self._keys[1 : count + 1]

    def after(self, count: int) -> bytes:
        """Returns the key after the first ``count`` blocks, which a match has found or skipped."""
        return self._keys[count]


class PrefixIndex:
    """Content address of full blocks: ``key(block) = hash(key(parent), tokens of the block)``.

    The chain starts from a root key made of the salt, so equal tokens under different salts
    (tenants, adapters) never match. Keys are 128-bit BLAKE2b digests: equal keys are taken for
    equal prefixes. The hash is keyed: without ``key`` an outsider can neither compute the digest of
    a prefix nor search for two prefixes with one digest.

    Each key finds one block. Further blocks with the same content are *duplicates*: the oldest one
    is found once the first block is removed. All operations are O(1) per block.

    Args:
        block_size: tokens in a full block, at least 1.
        key: hash key, 1 to 64 secret bytes; None draws a random one for this index. Indices with
            equal keys compute equal digests in every process.
        window: tokens that a token sees, itself included: a prefix is then found if its blocks in
            the window of the next token are, see `PromptKeys.match_window`. None: if all are.

    Raises:
        TypeError: the key is not bytes, or ``block_size`` not an integer.
        ValueError: the key is empty or longer than 64 bytes, or ``block_size`` is below 1.

    Example::

        index = PrefixIndex(block_size=2)
        key = index.next_key(index.root(), [5, 6])
        index.insert(key, 3)
        index.match([5, 6, 7])  # ([3], key)
    """

    def __init__(
        self, block_size: int, *, key: bytes | None = None, window: int | None = None
    ) -> None:
        self.window = None if window is None else whole("window", window, 1)
        self.block_size = whole("block_size", block_size, 1)
        self._hash_key = _checked_key(key)
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._duplicates: dict[bytes, dict[int, None]] = {}

    def root(self, salt: Salt = None) -> bytes:
        """Returns the key of the empty prefix under ``salt``; ``TypeError`` for other types."""
        match salt:
            case None:
                data = b"none"
            case str():
                data = b"str:" + salt.encode()
            case bytes():
                data = b"bytes:" + salt
            case _:
                raise TypeError(f"expected salt as str, bytes or None, got {salt!r}: pass its repr")
        return self._digest(data, person=b"root")

    def next_key(self, parent: bytes, tokens: Tokens, start: int = 0) -> bytes:
        """Returns the key of the block ``tokens[start : start + block_size]`` after ``parent``.

        Raises ``TypeError`` if a token is not an integer, ``ValueError`` if the block is not full.
        """
        block = tokens[start : start + self.block_size]
        if len(block) < self.block_size:
            raise ValueError(
                f"expected a full block of {self.block_size} tokens from {start} on, "
                f"got {len(block)}: only full blocks have a key"
            )
        return self._digest(parent + token_bytes(block))

    def match(
        self,
        tokens: Tokens | PromptKeys,
        salt: Salt = None,
        *,
        limit: int | None = None,
    ) -> tuple[list[int], bytes]:
        """Returns the blocks of the longest indexed prefix of ``tokens``, and the key after it.

        Args:
            tokens: token ids, ``[n]`` of any integer type, or their keys.
            salt: extra key under which they were inserted; `PromptKeys` have their own.
            limit: number of tokens that are looked up; None: all.
        """
        prompt = tokens if isinstance(tokens, PromptKeys) else PromptKeys(self, tokens, salt)
        limit = len(prompt.tokens) if limit is None else limit
        if self.window is None:
            return prompt.match(self._block_of, limit)
        return prompt.match_window(self._block_of, limit, self.window)

    def prompt(self, tokens: Tokens | PromptKeys, salt: Salt) -> PromptKeys:
        """Returns the keys of tokens; ``ValueError`` for keys of another index."""
        if not isinstance(tokens, PromptKeys):
            return PromptKeys(self, tokens, salt)
        if tokens.index is not self:
            raise ValueError(
                "expected a prompt of this pool, got one of another, whose hash differs: create it "
                "with prompt() of this pool"
            )
        return tokens

    def insert(self, key: bytes, block: int) -> bool:
        """Indexes ``block`` under ``key``; returns whether it is the block that is found.

        The key of a block that has one does not change.
        """
        if block in self._key_of:
            return False
        self._key_of[block] = key
        if self._block_of.setdefault(key, block) == block:
            return True
        self._duplicates.setdefault(key, {})[block] = None
        return False

    def put(self, parent: bytes, data: bytes, block: int) -> bytes:
        """Indexes a full block after ``parent`` by ``data``, 8 bytes a token; returns its key."""
        key = self._digest(parent + data)
        self.insert(key, block)
        return key

    def key(self, block: int) -> bytes | None:
        """Returns the key of a block; None if it has none."""
        return self._key_of.get(block)

    def block(self, key: bytes) -> int:
        """Returns the block that ``key`` finds; ``KeyError`` if there is none."""
        return self._block_of[key]

    def __contains__(self, key: bytes) -> bool:
        return key in self._block_of

    def remove(self, block: int) -> None:
        """Removes a block if it is indexed; its key finds the oldest duplicate from now on."""
        key = self._key_of.pop(block, None)
        if key is None:
            return
        duplicates = self._duplicates.get(key)
        if self._block_of[key] == block:
            if duplicates is None:
                del self._block_of[key]
                return
            self._block_of[key] = block = next(iter(duplicates))
        assert duplicates is not None
        del duplicates[block]
        if not duplicates:
            del self._duplicates[key]

    def rename(self, new_ids: Mapping[int, int]) -> None:
        """Replaces block ids by new ones, which are a permutation of the old ones."""
        keys = {new: self._key_of.pop(old, None) for old, new in new_ids.items()}
        for key in {key for key in keys.values() if key is not None}:
            found = self._block_of[key]
            self._block_of[key] = new_ids.get(found, found)
            if key in self._duplicates:
                ids = self._duplicates[key]
                self._duplicates[key] = {new_ids.get(block, block): None for block in ids}
        self._key_of |= {block: key for block, key in keys.items() if key is not None}

    def __len__(self) -> int:
        return len(self._block_of)

    def _digest(self, data: bytes, person: bytes = b"") -> bytes:
        return blake2b(data, digest_size=_DIGEST_BYTES, key=self._hash_key, person=person).digest()


def check_tokens(tokens: Tokens) -> None:
    """Raises ``TypeError`` or ``ValueError`` unless an array is one sequence of token ids."""
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


def token_bytes(tokens: Tokens) -> bytes:
    """Returns 8 bytes for each token; ``TypeError`` if one is not a 64-bit integer."""
    if isinstance(tokens, np.ndarray):
        check_tokens(tokens)
        return np.ascontiguousarray(tokens, dtype=np.int64).tobytes()
    try:
        return array("q", list(tokens)).tobytes()
    except (TypeError, OverflowError) as error:
        raise TypeError(f"expected 64-bit integer tokens, got {list(tokens)}: {error}") from None


def _checked_key(key: bytes | None) -> bytes:
    if key is None:
        return secrets.token_bytes()
    if not isinstance(key, bytes):
        raise TypeError(f"expected a key of bytes or None, got {type(key).__name__}: encode it")
    if not 1 <= len(key) <= blake2b.MAX_KEY_SIZE:
        raise ValueError(
            f"expected a key of 1 to {blake2b.MAX_KEY_SIZE} bytes, got {len(key)}: "
            "pass secrets.token_bytes()"
        )
    return key
