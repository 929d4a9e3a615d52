"""An index of blocks by content: full ones by the hash of all tokens to their end, or parts."""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from compiled_attn.arguments import whole
from compiled_attn.cache.blocks.partial_hits import TOKEN_BYTES, PartialIndex

__all__ = ["PrefixIndex", "PrefixMatch", "PromptKeys", "Salt", "Tokens"]

Tokens: TypeAlias = Sequence[int] | NDArray[np.integer[Any]]
Salt: TypeAlias = str | bytes | None

_DIGEST_BYTES = 16
_KEY_BYTES = 32


class PrefixMatch(NamedTuple):
    """What of a prompt is found: full blocks, then the beginning of one more.

    Attributes:
        blocks: the full blocks, in order.
        key: the chain key after them.
        source: a block that begins with the next ``num_partial`` tokens, 0 where none is worth a
            copy.
        num_partial: tokens found in ``source``, fewer than a block.
    """

    blocks: list[int]
    key: bytes
    source: int = 0
    num_partial: int = 0


class PromptKeys:
    """The keys of the full blocks of a prompt, each hashed when it is first asked for.

    What is found under a key is looked up anew each time, so it is never out of date.

    Args:
        index: whose hash it is.
        tokens: ``[n]`` token ids, which stay as they are.
        salt: the extra key.
    """

    def __init__(self, index: PrefixIndex, tokens: Tokens, salt: Salt = None) -> None:
        check_tokens(tokens)
        self.index, self.tokens = index, tokens
        self._made = [index.root(salt)]

    def blocks(self, block_of: Mapping[bytes, int], limit: int) -> tuple[list[int], bytes]:
        """The blocks of the longest prefix of the first ``limit`` tokens, and the key after it."""
        blocks: list[int] = []
        made, size = self._made, self.index.block_size
        for number in range(limit // size):
            if number + 1 == len(made):
                made.append(self.index.next_key(made[number], self.tokens, number * size))
            block = block_of.get(made[number + 1])
            if block is None:
                break
            blocks.append(block)
        return blocks, made[len(blocks)]


class PrefixIndex:
    """Content address of full blocks: ``key(block) = hash(key(parent), tokens of the block)``.

    The chain starts from a root key made of the salt, so that equal tokens under different salts
    (tenants, adapters) never meet. Keys are 128-bit BLAKE2b digests: equal keys are taken for equal
    prefixes. The hash is keyed: without ``key`` one can neither compute the digest of a prefix nor
    look for two prefixes with one digest.

    One key has at most one block and one block at most one key. A block that comes second with a
    key is its *twin*: not found, until the first is removed. All operations are O(1) per block,
    those on partial matches O(log n).

    Args:
        block_size: tokens in a full block, at least 1.
        min_partial: leading tokens that a block must have in common to be found by a part of it,
            between 1 and ``block_size - 1``; None finds full blocks only and keeps no tokens.
        key: of the hash, 1 to 64 secret bytes; None draws a random one for this index. Indices with
            equal keys give equal digests, in every process.

    Raises:
        TypeError: the key is not bytes, or ``block_size`` not an integer.
        ValueError: the key is empty or longer than 64 bytes, or ``block_size`` is below 1.

    Example::

        index = PrefixIndex(block_size=2)
        key = index.next_key(index.root(), [5, 6])
        index.insert(key, 3)
        index.match([5, 6, 7])  # [3]
    """

    def __init__(
        self, block_size: int, min_partial: int | None = None, *, key: bytes | None = None
    ) -> None:
        self.block_size = whole("block_size", block_size, 1)
        self.min_partial = min_partial
        self._hash_key = _checked_key(key)
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._twins: dict[bytes, dict[int, None]] = {}
        self._key_of_twin: dict[int, bytes] = {}
        self._partial = PartialIndex()

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
        return self._digest(data, person=b"root")

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
        return self._digest(parent + token_bytes(block))

    def match(
        self, tokens: Tokens | PromptKeys, salt: Salt = None, *, limit: int | None = None
    ) -> list[int]:
        """Return the blocks of the longest indexed prefix of ``tokens``, full blocks only.

        Args:
            tokens, salt, limit: see :meth:`longest`.
        """
        prompt = tokens if isinstance(tokens, PromptKeys) else PromptKeys(self, tokens, salt)
        limit = len(prompt.tokens) if limit is None else limit
        return prompt.blocks(self._block_of, limit)[0]

    def longest(
        self, tokens: Tokens | PromptKeys, salt: Salt = None, *, limit: int | None = None
    ) -> PrefixMatch:
        """Return the longest indexed prefix of ``tokens``, the beginning of a block included.

        Args:
            tokens: token ids, ``[n]`` of any integer type, or the keys of them.
            salt: the extra key under which they were inserted; keys have one.
            limit: tokens that are looked at; None: all.
        """
        prompt = tokens if isinstance(tokens, PromptKeys) else PromptKeys(self, tokens, salt)
        limit = len(prompt.tokens) if limit is None else limit
        blocks, key = prompt.blocks(self._block_of, limit)
        start = len(blocks) * self.block_size
        rest = prompt.tokens[start : min(limit, start + self.block_size)]
        if self.min_partial is None or len(rest) < self.min_partial:
            return PrefixMatch(blocks, key)
        source, count = self._partial.longest(key, token_bytes(rest))
        worth = count >= self.min_partial
        return PrefixMatch(blocks, key, source, count) if worth else PrefixMatch(blocks, key)

    def insert(self, key: bytes, block: int) -> bool:
        """Make ``block`` findable under ``key``, or return False where either is taken.

        Where only the key is, ``block`` becomes a twin.
        """
        if block in self._key_of or block in self._key_of_twin:
            return False
        if key in self._block_of:
            self._twins.setdefault(key, {})[block] = None
            self._key_of_twin[block] = key
            return False
        self._block_of[key] = block
        self._key_of[block] = key
        return True

    def put(self, parent: bytes, data: bytes, block: int) -> bytes:
        """Index a block that follows ``parent`` and return the key after it.

        Args:
            parent: key of what comes before.
            data: its first tokens, 8 bytes each. Where they don't fill the block, it is only found
                in part, until it is put again with more; ``parent`` is returned.
            block: the block. Where another has this content already, that one stays the one that
                is found.
        """
        if len(data) < self.block_size * TOKEN_BYTES:
            if block not in self._key_of and block not in self._key_of_twin:
                self._partial.put(parent, data, block)
            return parent
        key = self._digest(parent + data)
        self.insert(key, block)
        if block not in self._key_of:
            self._partial.discard(block)
        elif self.min_partial is not None:
            self._partial.put(parent, data, block)
        return key

    def findable(self, before: int, length: int) -> int:
        """Up to which position blocks are indexed once ``length`` positions are computed.

        Args:
            before: positions that were computed before.
            length: those that are.
        """
        full = length - length % self.block_size
        step = self.min_partial
        if step is None:
            return full
        return length if (length - full) // step > max(0, before - full) // step else full

    def next_findable(self, length: int) -> int:
        """The next position above ``length`` up to which more can be found once it is computed."""
        step = self.min_partial or self.block_size
        inside = length % self.block_size
        return length - inside + min(inside - inside % step + step, self.block_size)

    def remove(self, block: int) -> None:
        """Forget ``block``; a twin is found instead. ``ValueError`` where it is not indexed."""
        if block not in self:
            raise ValueError(f"expected an indexed block, got {block}: insert it first")
        key = self._key_of.pop(block, None)
        if key is None:
            self._partial.discard(block)
            return
        twin = next(iter(self._twins.get(key, ())), 0)
        self._partial.hand_over(block, twin)
        self.remove_twin(twin)
        del self._block_of[key]
        if twin:
            self.insert(key, twin)

    def remove_twin(self, block: int) -> int:
        """Forget ``block`` where it is a twin; return the one that is found, 0 where it is none."""
        key = self._key_of_twin.pop(block, None)
        if key is None:
            return 0
        del self._twins[key][block]
        if not self._twins[key]:
            del self._twins[key]
        return self._block_of.get(key, 0)

    def withdraw(self, block: int) -> None:
        """Forget ``block`` in whatever way it is known; nothing where it is not."""
        self.remove_twin(block)
        if block in self:
            self.remove(block)

    def __contains__(self, block: int) -> bool:
        return block in self._key_of or block in self._partial

    def __len__(self) -> int:
        return len(self._key_of)

    def _digest(self, data: bytes, person: bytes = b"") -> bytes:
        return blake2b(data, digest_size=_DIGEST_BYTES, key=self._hash_key, person=person).digest()


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


def token_bytes(tokens: Tokens) -> bytes:
    """Return 8 bytes for each token, or raise ``TypeError`` where one is no 64-bit integer."""
    if isinstance(tokens, np.ndarray):
        check_tokens(tokens)
        return np.ascontiguousarray(tokens, dtype=np.int64).tobytes()
    try:
        return array("q", list(tokens)).tobytes()
    except (TypeError, OverflowError) as error:
        raise TypeError(f"expected 64-bit integer tokens, got {list(tokens)}: {error}") from None


def _checked_key(key: bytes | None) -> bytes:
    if key is None:
        return secrets.token_bytes(_KEY_BYTES)
    if not isinstance(key, bytes):
        raise TypeError(f"expected a key of bytes or None, got {type(key).__name__}: encode it")
    if not 1 <= len(key) <= blake2b.MAX_KEY_SIZE:
        raise ValueError(
            f"expected a key of 1 to {blake2b.MAX_KEY_SIZE} bytes, got {len(key)}: "
            f"pass secrets.token_bytes({_KEY_BYTES})"
        )
    return key
