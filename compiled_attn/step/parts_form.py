"""The form of steps for plain torch, whose parts of attention each have an axis to pad.

Its ladder: a step that prefills is nearly full and reads the context of its prompt (shared blocks);
a step that only decodes is small and reads the blocks of many requests (unique blocks). So the
prefill buckets are two ladders over the shared blocks, a fine one beside few unique blocks and a
coarse one beside many; the decode buckets grow in requests and unique blocks together; the maximum
holds the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from compiled_attn.attention.metadata import UnifiedMetadata
from compiled_attn.step.form import ModelWork, StepLimits
from compiled_attn.step.parts import BlockEntries, StepBatch, StepPlan
from compiled_attn.step.requests import Ints, StepRows, check_ids
from graphs import BucketSpace, explicit

__all__ = ["Parts"]

_CAUSAL_WIDTH = 256  # queries in a slice of the causal part


class Parts:
    """The form of steps whose causal, shared and unique parts are computed apart and merged.

    Args:
        num_blocks: blocks of the cache, null block included.
        block_size: slots in a block.
        width: blocks of the longest request; no tensor of this form depends on it.
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
        """A ladder of at most ``max_graphs`` buckets; with one, the maximum alone.

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
        """Of tokens, pairs of query and key, and logits.

        A unique block is read by products with a single row, at about a sixth of the rate of the
        matmuls, so it counts six times.
        """

        def cost(bucket: Mapping[str, int]) -> float:
            keys = bucket["tokens"] + bucket["shared"] * self.block_size
            pairs = bucket["tokens"] * keys + 6 * bucket["unique"] * self.block_size
            return work.linear * bucket["tokens"] + work.attention * pairs + bucket["logits"]

        return cost

    def least_bytes(self, bucket: Mapping[str, int]) -> int:
        """Of the inputs of a step, and of what it adds to the scores of its tokens.

        That is 4 bytes for each pair of tokens, beside one that says whether it counts.
        """
        tokens, blocks = bucket["tokens"], 4 * bucket["tokens"] * bucket["shared"]
        return 24 * tokens + 5 * tokens**2 + blocks + 40 * bucket["unique"]

    def smallest_need(self, blocks: int) -> dict[str, int]:
        """One token that alone reads the blocks."""
        return {"tokens": 1, "shared": 0, "unique": blocks, "logits": 1}

    def largest_need(self, limits: StepLimits) -> dict[str, int] | None:
        """None: to hold every mix of parts takes more buckets than to cut the rare ones."""
        return None

    def plan(self, rows: StepRows) -> StepPlan:
        """See `StepForm.plan`."""
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
        """See `StepForm.batch`."""
        return StepBatch(*fields)  # type: ignore[arg-type]  # the first four are tensors

    def metadata(self, batch: StepBatch, block_size: int) -> UnifiedMetadata:
        """See `StepBatch.metadata`."""
        return batch.metadata(block_size, _CAUSAL_WIDTH)

    def wanted(self, batch: StepBatch, block_size: int) -> UnifiedMetadata | None:
        """None: a row does not know which blocks are those of its request."""
        return None

    def over(self, num_blocks: int, block_size: int, width: int) -> Parts:
        """See `StepForm.over`."""
        return Parts(num_blocks, block_size, width)

    def _entries(self, rows: StepRows, visible: Ints) -> BlockEntries:
        counts = -(-visible // self.block_size)
        first = np.cumsum(counts) - counts
        owner = np.repeat(np.arange(len(counts)), counts)
        index = np.arange(len(owner)) - first[owner]
        starts = index * self.block_size
        usage = np.minimum(visible[owner] - starts, self.block_size)
        ids = rows.blocks[rows.base[owner] + index].astype(np.int64)
        return BlockEntries(ids, owner, starts, usage)

    def _repeated(self, ids: Ints) -> NDArray[np.bool_]:
        # The last entry of a block wins its place; whoever did not win shares the block with it.
        order = np.arange(len(ids))
        self._last_entry[ids] = order
        lost: NDArray[np.bool_] = self._last_entry[ids] != order
        if not lost.any():
            return lost
        self._is_repeated[ids[lost]] = True
        repeated: NDArray[np.bool_] = self._is_repeated[ids]
        self._is_repeated[ids[lost]] = False
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
    """Every context takes two tokens that share its blocks."""
    contexts = max(1, min(limits.seqs, limits.tokens // 2))
    shared = min(limits.pool_blocks, contexts * limits.context_blocks)
    return limits.tokens, shared, limits.pool_blocks, limits.seqs


def _one_context(limits: StepLimits) -> int:
    return min(limits.context_blocks, limits.pool_blocks)


def _share(maximum: int, share: float) -> int:
    return max(1, math.ceil(maximum * share))
