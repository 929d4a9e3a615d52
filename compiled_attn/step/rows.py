"""The rows of a step: its requests and their new tokens as arrays, and how arrays are padded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = [
    "Ints",
    "StepRows",
    "block_tables",
    "check_holds",
    "check_ids",
    "checked_sizes",
    "logits_rows",
    "padded",
]

Ints = NDArray[np.int64]


class StepRows(NamedTuple):
    """The requests of a step as arrays, and their new tokens flattened.

    Request i's block table is ``blocks[base[i] : base[i] + held[i]]``.

    Shape (R requests, T tokens): base, held, context, query, logits, is_prefill, first_row ``[R]``;
    tokens, positions, slots ``[T]``.
    """

    blocks: Ints
    base: Ints
    held: Ints
    context: Ints
    query: Ints
    logits: Ints
    is_prefill: NDArray[np.bool_]
    first_row: Ints
    tokens: Ints
    positions: Ints
    slots: Ints


def block_tables(rows: StepRows, used: Ints, requests: int, width: int) -> Ints:
    """The first ``used [R]`` blocks of each request, padded with null block 0 to ``[requests,
    width]``.
    """
    tables = np.zeros((requests, width), np.int64)
    owner = np.repeat(np.arange(len(used)), used)
    column = _ramps(np.zeros_like(used), used)
    tables[owner, column] = rows.blocks[rows.base[owner] + column]
    return tables


def logits_rows(rows: StepRows) -> Ints:
    """Rows of T whose logits are wanted, requests in order."""
    return _ramps(rows.first_row + rows.query - rows.logits, rows.logits)


def check_ids(ids: Ints, num_blocks: int) -> None:
    """Raises ValueError unless all ids are those of blocks that requests can hold."""
    low, high = int(ids.min(initial=1)), int(ids.max(initial=1))
    if low < 1 or high >= num_blocks:
        raise ValueError(
            f"expected block ids in 1..{num_blocks - 1}, got {low}..{high}: "
            "block 0 is the null block, and the cache ends at num_blocks"
        )


def checked_sizes(sizes: Mapping[str, int], needed: Sequence[str]) -> dict[str, int]:
    """The sizes of a bucket as a dict.

    Raises:
        ValueError: a needed one is missing, or negative.
    """
    missing = [name for name in needed if name not in sizes]
    if missing:
        raise ValueError(
            f"expected a bucket with {', '.join(needed)}, got {dict(sizes)}: add "
            f"{', '.join(missing)}, 0 where there is none"
        )
    negative = {name: sizes[name] for name in needed if sizes[name] < 0}
    if negative:
        raise ValueError(f"expected sizes of at least 0, got {negative}: a part has 0 or more")
    return dict(sizes)


def check_holds(sizes: Mapping[str, int], need: Mapping[str, int]) -> None:
    """Raises ValueError unless a bucket holds a need."""
    short = {axis: n for axis, n in need.items() if sizes.get(axis, 0) < n}
    if short:
        raise ValueError(
            f"expected a bucket that holds {short}, got {dict(sizes)}: pick it with plan(...).need"
        )


def padded(values: Ints, size: int, fill: int = 0) -> Tensor:
    """Values as an int64 tensor of a size, filled up behind."""
    # A fresh array each time: tensors handed to one step are never written by the next.
    whole = np.empty(size, np.int64)
    whole[: len(values)] = values
    whole[len(values) :] = fill
    return torch.from_numpy(whole)


def _ramps(first: Ints, counts: Ints) -> Ints:
    """``first[i], first[i] + 1, ...`` for ``counts[i]`` numbers, for each i in turn."""
    ends = np.cumsum(counts)
    return np.repeat(first - (ends - counts), counts) + np.arange(ends[-1])
