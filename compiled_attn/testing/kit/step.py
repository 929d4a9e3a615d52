"""A step that the kit tests: sizes and features, from which `Scene` makes tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

__all__ = ["JUNK", "QUANTISED", "Step"]

JUNK = 40.0
"""What is in slots that belong to nobody, unless they are poisoned: far from all real values."""

QUANTISED = {
    "int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2,
}  # fmt: skip
"""Element types of quantised caches by the name of their feature."""


@dataclass(frozen=True)
class Step:
    """One call over a paged cache, as plain numbers that can be shrunk and printed.

    Attributes:
        requests: query rows and keys of each request; the keys include those of the query rows.
        shared: leading blocks that all requests share whose earlier tokens fill them.
        heads, kv_heads, head_dim, block_size: sizes.
        value_dim: elements of a value; None: as of a key.
        latent: values are the first ``value_dim`` elements of the keys, in the same memory.
        dtype: of queries, and of the caches unless they are quantised.
        cache: a name in `QUANTISED`, or None.
        causal, window, softcap: as in `compiled_attn.ops.reference.paged_attention`.
        alibi, sinks: whether heads have slopes and sinks.
        scale: factor of the scores; None: ``head_dim ** -0.5``.
        append: the call writes keys and values of the query rows.
        lse: the log-sum-exp is compared too.
        rotary: elements of a head that are rotated; 0: none.
        index: dtype of block tables and lengths.
        strided: queries, caches and tables are views of larger tensors.
        gaps: so are the blocks: keys and values may be the halves of a larger one.
        padding: query rows of no request.
        padded_requests: rows of the batch that are no request.
        unowned: what is in memory that belongs to no request.
        spread: standard deviation of queries; 1 elsewhere.
        room: blocks in a row of the table; None: one more than the longest request needs.
        seed: of all random numbers.
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
    room: int | None = None
    seed: int = 0

    def but(self, **changes: Any) -> Step:
        """Returns the step with other fields."""
        return replace(self, **changes)

    @property
    def is_poisoned(self) -> bool:
        """Whether unowned memory holds NaN or inf."""
        return not math.isfinite(self.unowned)

    def blocks_of(self, keys: int) -> int:
        """Number of blocks of so many keys."""
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
        """Returns another step for the same buffers: other lengths, blocks and numbers.

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
        return self.but(requests=requests, seed=self.seed + 1, shared=0, room=self.width)

    def __str__(self) -> str:
        """All that differs from a plain step, in one line."""
        shown = [f"requests (rows, keys) {' '.join(map(_pair, self.requests))}"]
        for each in fields(self)[1:]:
            value = getattr(self, each.name)
            if value != each.default or each.name in ("heads", "kv_heads", "head_dim", "dtype"):
                shown.append(f"{each.name} {str(value).removeprefix('torch.')}")
        return ", ".join(shown)


def _pair(sizes: Sequence[int]) -> str:
    return f"({sizes[0]}, {sizes[1]})"
