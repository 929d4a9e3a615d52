"""One call that the kit tests: sizes and features, from which `Scene` builds tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

__all__ = ["JUNK", "QUANTISED", "Step"]

JUNK = 40.0
"""Value of unowned slots that are not poisoned, far from all real values."""

QUANTISED = {
    "int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2,
}  # fmt: skip
"""Element dtypes of quantised caches, by feature."""


@dataclass(frozen=True)
class Step:
    """One call over a paged cache, as plain numbers that can be shrunk and printed.

    Attributes:
        requests: query rows and keys of each request; the keys include those of the query rows.
        shared: leading blocks shared by all requests that are long enough.
        heads, kv_heads, head_dim, block_size: sizes.
        value_dim: head size of values; None: ``head_dim``.
        latent: values are the first ``value_dim`` elements of the keys (MLA).
        dtype: dtype of queries, and of the caches unless they are quantised.
        cache: a name in `QUANTISED`, or None.
        causal, window, softcap: as in `compiled_attn.ops.reference.paged_attention`.
        alibi, sinks: whether heads have slopes and sinks.
        scale: softmax scale; None: ``head_dim ** -0.5``.
        append: whether the call writes keys and values of the query rows.
        lse: whether the log-sum-exp is compared too.
        rotary: rotary dimension; 0: no rotary embedding.
        index: dtype of block tables and lengths.
        strided: queries, caches and tables are views of larger tensors.
        gaps: the same for blocks: keys and values may be the halves of a larger one.
        padding: padding rows of the queries.
        padded_requests: padding rows of the batch.
        unowned: value of cache slots that belong to no request.
        spread: standard deviation of queries; that of keys and values is 1.
        units: values are zero, but for an element of its own for each of many keys.
        first_block: smallest block id, apart from null block 0.
        room: columns of the block table; None: one more than the longest request needs.
        seed: seed of all random numbers.
    """

    requests: tuple[tuple[int, int], ...]
    shared: int = 0
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 16
    value_dim: int | None = None
    latent: bool = False
    dtype: torch.dtype = torch.float32
    cache: str | None = None
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    alibi: bool = False
    sinks: bool = False
    scale: float | None = None
    append: bool = False
    lse: bool = False
    rotary: int = 0
    index: torch.dtype = torch.int32
    strided: bool = False
    gaps: bool = False
    padding: int = 0
    padded_requests: int = 0
    unowned: float = JUNK
    spread: float = 1.0
    units: bool = False
    first_block: int = 1
    room: int | None = None
    seed: int = 0

    def replace(self, **changes: Any) -> Step:
        """Returns a copy with some fields replaced."""
        return replace(self, **changes)

    @property
    def is_poisoned(self) -> bool:
        """Whether unowned memory holds NaN or inf."""
        return not math.isfinite(self.unowned)

    def blocks_of(self, keys: int) -> int:
        """Returns the number of blocks that ``keys`` keys need."""
        return -(-keys // self.block_size)

    @property
    def width(self) -> int:
        """Columns of the block table."""
        most = max((self.blocks_of(keys) for _, keys in self.requests), default=0)
        return self.room or most + 1

    @property
    def capacity(self) -> int:
        """Tokens that fit in a row of the block table."""
        return self.width * self.block_size

    def changed(self) -> Step:
        """Returns another step with the same shapes: other lengths, blocks and values.

        Requests keep their places, so that shapes stay; the longest becomes the shortest, and the
        new longest one has a block more than any had. Row counts move to other requests unless all
        are equal.
        """
        counts = [rows for rows, _ in self.requests][::-1]
        olds = [keys - rows for rows, keys in self.requests]
        order = sorted(range(len(olds)), key=olds.__getitem__)
        past = dict(zip(order, reversed([olds[at] for at in order]), strict=True))
        size = self.block_size
        requests = tuple(
            (rows, min(self.capacity, past[at] + rows + size)) for at, rows in enumerate(counts)
        )
        return self.replace(requests=requests, seed=self.seed + 1, shared=0, room=self.width)

    def __str__(self) -> str:
        """Returns the fields that differ from their defaults, in one line."""
        shown = [f"requests (rows, keys) {' '.join(map(_pair, self.requests))}"]
        for each in fields(self)[1:]:
            value = getattr(self, each.name)
            if value != each.default or each.name in ("heads", "kv_heads", "head_dim", "dtype"):
                shown.append(f"{each.name} {str(value).removeprefix('torch.')}")
        return ", ".join(shown)


def _pair(sizes: Sequence[int]) -> str:
    return f"({sizes[0]}, {sizes[1]})"
