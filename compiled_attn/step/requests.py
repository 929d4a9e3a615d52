"""The requests of a step: as objects, as rows of a persistent table, or as arrays."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = [
    "Ints",
    "Request",
    "RequestTable",
    "StepRows",
    "block_ids",
    "block_tables",
    "check_holds",
    "check_ids",
    "check_tables",
    "checked_sizes",
    "logits_rows",
    "padded",
]

Ints = NDArray[np.int64]

_INT32 = np.iinfo(np.int32)


@dataclass(frozen=True, slots=True)
class Request:
    """What one request computes in a step.

    Args:
        tokens: ``[query_len]`` ids of the step's tokens.
        context_len: tokens before them, whose keys and values are already in the cache.
        block_table: ids of the request's blocks in order of position, at least
            ``ceil((context_len + query_len) / block_size)`` of them; later entries are ignored.
        num_logits: how many of the last tokens need logits (0 for a chunk that does not end its
            prompt).
        prompt_len: tokens of its prompt: the step is a prefill while ``context_len`` is below.
            None: it is a prefill with several new tokens or without context.
        state_slot: slot of its recurrent states; 0: it has none.
    """

    tokens: Sequence[int] | Ints
    context_len: int
    block_table: Sequence[int] | Ints
    num_logits: int = 1
    prompt_len: int | None = None
    state_slot: int = 0

    @property
    def is_prefill(self) -> bool:
        """Whether the request is still in its prompt."""
        if self.prompt_len is None:
            return len(self.tokens) > 1 or self.context_len == 0
        return self.context_len < self.prompt_len


class RequestTable:
    """Block tables of the running requests in one array, which is updated from step to step, and
    the slots of their recurrent states, 0 without.

    A decode step changes at most one entry per request, so updates are cheap and a step is built
    without Python work per block.

    Args:
        in_place: whether a step of the first rows, in order, reads them without a copy; it must
            then be filled and run before the table changes again.
    """

    def __init__(self, max_requests: int, max_blocks: int, *, in_place: bool = False) -> None:
        if max_requests < 1 or max_blocks < 1:
            raise ValueError(f"expected sizes of at least 1, got {max_requests} and {max_blocks}")
        self.blocks = np.zeros((max_requests, max_blocks), np.int32)
        self.lengths = np.zeros(max_requests, np.int64)
        self.state_slots = np.zeros(max_requests, np.int64)
        self._rows: dict[Hashable, int] = {}
        self._free = list(range(max_requests - 1, -1, -1))
        self._in_place = in_place
        self._lowest, self._highest = 1, 1  # ids ever written

    def add(
        self, request_id: Hashable, blocks: Sequence[int] | Ints = (), state_slot: int = 0
    ) -> int:
        """Assigns a row to a request and returns it.

        Raises:
            ValueError: it has a row, no row is free, or there are too many blocks.
        """
        if request_id in self._rows or not self._free:
            problem = "has a row" if request_id in self._rows else "finds no free row"
            raise ValueError(
                f"expected a new request and a free row, but request {request_id!r} {problem}"
            )
        self._check_room(request_id, 0, len(blocks))
        row = self._free.pop()
        self._rows[request_id] = row
        self.blocks[row, : self.lengths[row]] = self.lengths[row] = 0
        self.state_slots[row] = state_slot
        self.extend(request_id, blocks)
        return row

    @property
    def num_free(self) -> int:
        """Free rows."""
        return len(self._free)

    def extend(self, request_id: Hashable, blocks: Sequence[int] | Ints) -> None:
        """Appends blocks to a request's row."""
        self.write(request_id, int(self.lengths[self.row(request_id)]), blocks)

    def write(self, request_id: Hashable, start: int, blocks: Sequence[int] | Ints) -> None:
        """Replaces the blocks of a request's row from ``start`` on."""
        row = self.row(request_id)
        if not 0 <= start <= self.lengths[row]:
            raise ValueError(
                f"expected a start in 0..{self.lengths[row]}, the blocks of request "
                f"{request_id!r}, got {start}: rows have no gaps"
            )
        self._check_room(request_id, start, len(blocks))
        ids = block_ids(blocks)
        self._lowest = min(self._lowest, int(ids.min(initial=1)))
        self._highest = max(self._highest, int(ids.max(initial=1)))
        end, before = start + len(ids), int(self.lengths[row])
        self.blocks[row, start:end] = ids
        self.blocks[row, end:before] = 0
        self.lengths[row] = end

    def release(self, request_id: Hashable, count: int) -> None:
        """Replaces the first ``count`` blocks of a request's row by null block 0: no step reads
        them, as they are before the sliding windows of all layers.
        """
        self._check_room(request_id, 0, count)
        row = self.row(request_id)
        self.blocks[row, :count] = 0
        self.lengths[row] = max(count, self.lengths[row])

    def remove(self, request_id: Hashable) -> None:
        """Frees the row of a request."""
        self._free.append(self.row(request_id))
        del self._rows[request_id]

    def close_gaps(self) -> None:
        """Moves the rows of requests to the front, in order."""
        order = sorted(self._rows, key=self._rows.__getitem__)
        rows, count = self.rows(order), len(order)
        for each in (self.blocks, self.lengths, self.state_slots):
            each[:count] = each[rows]
        used = len(self.lengths) - int((self.lengths[::-1] > 0).argmax())
        self.blocks[count:used] = self.lengths[count:used] = 0
        self._rows = {each: row for row, each in enumerate(order)}
        self._free = list(range(len(self.lengths) - 1, count - 1, -1))

    def in_place(self, rows: Ints, num_blocks: int) -> NDArray[np.int32] | None:
        """Returns the array itself, if a step of these rows may read it; None: it may not."""
        is_sound = self._in_place and self._lowest > 0 and self._highest < num_blocks
        is_first = is_sound and bool((rows == np.arange(len(rows))).all())
        return self.blocks if is_first else None

    def row(self, request_id: Hashable) -> int:
        """Returns the row of a request."""
        row = self._rows.get(request_id)
        if row is None:
            raise KeyError(f"expected a request of the table, got {request_id!r}: add it first")
        return row

    def rows(self, request_ids: Iterable[Hashable]) -> Ints:
        """Returns the rows of several requests, see `row`."""
        rows = [*map(self._rows.get, request_ids)]
        if None in rows:
            rows = [*map(self.row, request_ids)]  # raises for the one without
        return np.array(rows, np.int64)

    def __contains__(self, request_id: Hashable) -> bool:
        return request_id in self._rows

    def _check_room(self, request_id: Hashable, start: int, count: int) -> None:
        if start + count > self.blocks.shape[1]:
            raise ValueError(
                f"expected at most {self.blocks.shape[1]} blocks for request {request_id!r}, got "
                f"{start + count}: make the table with a larger max_blocks"
            )


class StepRows(NamedTuple):
    """The requests of a step as arrays, and their new tokens flattened.

    Request i's block table is ``blocks[base[i] : base[i] + held[i]]``, followed by arbitrary values
    up to the length of the longest. ``in_place``, if not None, has the tables in its first R rows,
    padded with null block 0. ``unread`` counts leading blocks that are before the sliding windows
    of all layers, and may be null; None: there are no windows. ``state_slots`` are those of
    recurrent states, 0 without.

    Shape (R requests, T tokens): base, held, context, query, logits, is_prefill, first_row,
    state_slots, unread ``[R]``; tokens, positions, slots ``[T]``.
    """

    blocks: NDArray[np.int32]
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
    state_slots: Ints
    in_place: NDArray[np.int32] | None
    unread: Ints | None = None


def block_tables(rows: StepRows, used: Ints, requests: int, width: int) -> NDArray[np.int32]:
    """Returns the first ``used [R]`` blocks of each request, padded with null block 0 to
    ``[requests, width]``.
    """
    fewest, most = int(used.min()), int(used.max())
    tables = np.zeros((requests, width), np.int32)
    # Rows are copied with the values after them, which are then zeroed.
    windows = np.lib.stride_tricks.as_strided(
        rows.blocks, (len(rows.blocks) - most + 1, most), 2 * rows.blocks.strides, writeable=False
    )
    tables[: len(used), :most] = windows[rows.base]
    tables[: len(used), fewest:most][np.arange(fewest, most) >= used[:, None]] = 0
    return tables


def block_ids(blocks: Sequence[int] | Ints) -> NDArray[np.int32]:
    """Converts ids to 32 bits; one that does not fit stays invalid."""
    return np.asarray(blocks, np.int64).clip(_INT32.min, _INT32.max).astype(np.int32)


def check_tables(
    tables: NDArray[np.int32], used: Ints, num_blocks: int, unread: Ints | None = None
) -> None:
    """Raises ValueError unless the first ``used [R]`` entries of each row of ``[R, W]`` are valid
    block ids, and the others 0; the first ``unread [R]`` may be 0 too.
    """
    low, high, ids = tables.min(initial=0), tables.max(initial=0), int(used.sum())
    if low < 0 or high >= num_blocks or np.count_nonzero(tables) != ids:
        column = np.arange(tables.shape[1])
        is_read = column < used[:, None]
        if unread is not None:
            is_read &= (column >= unread[:, None]) | (tables != 0)
        check_ids(tables[is_read], num_blocks)


def logits_rows(rows: StepRows) -> Ints:
    """Returns the rows of T that need logits, requests in order."""
    return _ramps(rows.first_row + rows.query - rows.logits, rows.logits)


def check_ids(ids: NDArray[np.integer[Any]], num_blocks: int) -> None:
    """Raises ValueError unless all are valid block ids."""
    low, high = int(ids.min(initial=1)), int(ids.max(initial=1))
    if low < 1 or high >= num_blocks:
        raise ValueError(
            f"expected block ids in 1..{num_blocks - 1}, got {low}..{high}: "
            "block 0 is the null block, and the cache ends at num_blocks"
        )


def checked_sizes(sizes: Mapping[str, int], needed: Sequence[str]) -> dict[str, int]:
    """Returns the sizes of a bucket as a dict.

    Raises:
        ValueError: a needed one is missing, or negative.
    """
    missing = [name for name in needed if name not in sizes]
    if missing:
        raise ValueError(
            f"expected a bucket with {', '.join(needed)}, got {dict(sizes)}: add "
            f"{', '.join(missing)}, 0 for a missing part"
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


def padded(values: NDArray[np.integer[Any]], size: int, fill: int = 0) -> Tensor:
    """Pads values at the end to an int64 tensor of ``size``."""
    # A new array each time: the next step must not write the tensors of this one.
    whole = np.empty(size, np.int64)
    whole[: len(values)] = values
    whole[len(values) :] = fill
    return torch.from_numpy(whole)


def _ramps(first: Ints, counts: Ints) -> Ints:
    """``first[i], first[i] + 1, ...`` for ``counts[i]`` numbers, for each i in turn."""
    ends = np.cumsum(counts)
    return np.repeat(first - (ends - counts), counts) + np.arange(ends[-1])
