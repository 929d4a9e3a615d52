"""The layout of steps for plain torch, with an axis for each part of attention.

Its ladder: a step that prefills is nearly full and reads the context of its prompt (shared blocks);
a step that only decodes is small and reads the blocks of many requests (unique blocks). So the
prefill buckets are two ladders over the shared blocks, a fine one with few unique blocks and a
coarse one with many; the decode buckets grow in requests and unique blocks together; the maximum
holds the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from compiled_attn.attention.metadata import UnifiedMetadata
from compiled_attn.step.layout import ModelWork, StepLimits
from compiled_attn.step.parts import BlockEntries, StepBatch, StepPlan
from compiled_attn.step.requests import Ints, StepRows, check_ids
from graphs import BucketSpace, explicit

__all__ = ["PartsLayout"]

_CAUSAL_WIDTH = 256  # queries in a slice of the causal part


class PartsLayout:
    """The layout of steps whose causal, shared and unique parts are computed separately and merged.

    Args:
        width: blocks of the longest request; no tensor of this layout depends on it.
    """

    axes = ("tokens", "shared", "unique", "logits")
    symbolic: tuple[str, ...] = ()  # all sizes are compiled in
    reads_range = True

    def __init__(self, num_blocks: int, block_size: int, width: int | None = None) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        # Scratch of the size of the pool, written and read only where a step has entries.
        self._last_entry = np.zeros(num_blocks, np.int64)
        self._is_repeated = np.zeros(num_blocks, np.bool_)

    def ladder(
        self, limits: StepLimits, max_graphs: int, *, one_compile: bool = False
    ) -> BucketSpace:
        """Returns at most ``max_graphs`` buckets; with one, the maximum alone.

        ``one_compile`` changes nothing: no axis is `symbolic`.

        The number of points on the shared axis grows until the budget is used up; a budget too
        small for that goes to decode steps, which would pay most in the maximum.
        """
        decode, maximum = list(_decode(limits)), _maximum(limits)
        best = explicit(self.axes, [maximum, *decode[::-1][: max_graphs - 1]])
        for points in range(1, 24):
            space = explicit(self.axes, [*_prefill(limits, points), *decode, maximum])
            if len(space) > max_graphs:
                break
            best = space
        return best

    def cost(self, work: ModelWork) -> Callable[[Mapping[str, int]], float]:
        """See `StepLayout.cost`: tokens, pairs of query and key, and logits.

        A unique block is read by a single query, at about a sixth of the rate of the matmuls, so it
        counts six times.
        """

        def cost(bucket: Mapping[str, int]) -> float:
            keys = bucket["tokens"] + bucket["shared"] * self.block_size
            pairs = bucket["tokens"] * keys + 6 * bucket["unique"] * self.block_size
            return work.linear * bucket["tokens"] + work.attention * pairs + bucket["logits"]

        return cost

    def least_bytes(self, bucket: Mapping[str, int]) -> int:
        """See `StepLayout.least_bytes`: the inputs, and bias and mask of each pair of tokens."""
        tokens, blocks = bucket["tokens"], 4 * bucket["tokens"] * bucket["shared"]
        return 24 * tokens + 5 * tokens**2 + blocks + 40 * bucket["unique"]

    def smallest_need(self, blocks: int) -> dict[str, int]:
        """See `StepLayout.smallest_need`."""
        return {"tokens": 1, "shared": 0, "unique": blocks, "logits": 1}

    def largest_need(self, limits: StepLimits) -> dict[str, int] | None:
        """None: a bucket for every mix of parts costs more than to cut the rare ones."""
        return None

    def plan(self, rows: StepRows) -> StepPlan:
        """See `StepLayout.plan`."""
        visible = np.where(rows.query == 1, rows.context + 1, rows.context)
        entries = self._entries(rows, visible)
        check_ids(entries.ids, self.num_blocks)
        shared = self._repeated(entries.ids)
        if len(rows.tokens) > len(rows.query):
            shared = shared | (rows.query > 1)[entries.owner]
        return StepPlan(rows, entries, shared, self.block_size)

    def padding(self, bucket: Mapping[str, int]) -> StepBatch:
        """See `StepBatch.padding`."""
        return StepBatch.padding(bucket)

    def batch(self, fields: Sequence[Tensor | None]) -> StepBatch:
        """See `StepLayout.batch`."""
        return StepBatch(*fields)  # type: ignore[arg-type]  # the first four are tensors

    def metadata(self, batch: StepBatch, block_size: int) -> UnifiedMetadata:
        """See `StepBatch.metadata`."""
        return batch.metadata(block_size, _CAUSAL_WIDTH)

    def logits_metadata(self, batch: StepBatch, block_size: int) -> UnifiedMetadata | None:
        """None: a row does not know the blocks of its request."""
        return None

    def over(self, num_blocks: int, block_size: int, width: int) -> PartsLayout:
        """See `StepLayout.over`."""
        return PartsLayout(num_blocks, block_size, width)

    def _entries(self, rows: StepRows, visible: Ints) -> BlockEntries:
        counts = -(-visible // self.block_size)
        if rows.unread is not None:
            counts = counts - rows.unread
        first = np.cumsum(counts) - counts
        owner = np.repeat(np.arange(len(counts)), counts)
        index = np.arange(len(owner)) - first[owner]
        if rows.unread is not None:
            index += rows.unread[owner]
        starts = index * self.block_size
        usage = np.minimum(visible[owner] - starts, self.block_size)
        ids = rows.blocks[rows.base[owner] + index].astype(np.int64)
        return BlockEntries(ids, owner, starts, usage)

    def _repeated(self, ids: Ints) -> NDArray[np.bool_]:
        # The last entry of a block overwrites the others, which therefore share the block with it.
        order = np.arange(len(ids))
        self._last_entry[ids] = order
        is_overwritten: NDArray[np.bool_] = self._last_entry[ids] != order
        if not is_overwritten.any():
            return is_overwritten
        self._is_repeated[ids[is_overwritten]] = True
        repeated: NDArray[np.bool_] = self._is_repeated[ids]
        self._is_repeated[ids[is_overwritten]] = False
        return repeated


def _prefill(limits: StepLimits, points: int) -> Iterator[tuple[int, ...]]:
    tokens, pool, seqs = limits.tokens, limits.pool_blocks, limits.seqs
    shared_max = _one_context(limits)
    fine = [_share(shared_max, step / 2**octave) for octave in range(12) for step in (1, 0.75)]
    for number, shared in enumerate(fine[:points]):
        yield tokens, shared, _share(pool, 3 / 16), seqs
        if number % 2 == 0:
            yield tokens, shared, _share(pool, 3 / 4), seqs


def _decode(limits: StepLimits) -> Iterator[tuple[int, ...]]:
    pool, seqs, shared_max = limits.pool_blocks, limits.seqs, _one_context(limits)
    for few, blocks in ((1 / 4, 1 / 16), (1 / 2, 1 / 8), (1, 1 / 4), (1, 1 / 2)):
        requests = _share(seqs, few)
        yield requests, _share(shared_max, 1 / 32), _share(pool, blocks), requests
    yield seqs, shared_max, pool, seqs


def _maximum(limits: StepLimits) -> tuple[int, int, int, int]:
    """A context is shared by at least two tokens."""
    contexts = max(1, min(limits.seqs, limits.tokens // 2))
    shared = min(limits.pool_blocks, contexts * limits.context_blocks)
    return limits.tokens, shared, limits.pool_blocks, limits.seqs


def _one_context(limits: StepLimits) -> int:
    return min(limits.context_blocks, limits.pool_blocks)


def _share(maximum: int, share: float) -> int:
    return max(1, math.ceil(maximum * share))
