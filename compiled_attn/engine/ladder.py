"""The engine's default buckets: few graphs, no step without one.

A step that prefills is nearly full and reads the context of its prompt (shared blocks); a step that
only decodes is small and reads the blocks of many requests (unique blocks). So the prefill buckets
are two ladders over the shared blocks, a fine one beside few unique blocks and a coarse one beside
many; the decode buckets grow in requests and unique blocks together; the maximum holds the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from graphs import BucketSpace, explicit

__all__ = [
    "AXES",
    "TABLE_AXES",
    "StepLimits",
    "default_buckets",
    "step_cost",
    "table_buckets",
    "table_cost",
]

AXES = ("tokens", "shared", "unique", "logits")
TABLE_AXES = ("tokens", "requests")
"""With the native kernel: it reads what a step needs, whatever its bucket."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest step that the scheduler can make."""

    tokens: int
    seqs: int
    context_blocks: int
    pool_blocks: int

    @property
    def shared_blocks(self) -> int:
        """Cached blocks that several tokens each can read; every context takes two tokens."""
        contexts = max(1, min(self.seqs, self.tokens // 2))
        return min(self.pool_blocks, contexts * self.context_blocks)


def default_buckets(limits: StepLimits, max_graphs: int) -> BucketSpace:
    """A ladder of at most ``max_graphs`` buckets; with one, the maximum alone.

    The number of points on the shared axis grows until the budget is used up; a budget too small
    for that goes to decode steps, which would pay most in the maximum.
    """
    decode = list(_decode(limits))[::-1]
    best = explicit(AXES, [_maximum(limits), *decode[: max_graphs - 1]])
    for points in range(1, 24):
        space = explicit(AXES, [*_prefill(limits, points), *_decode(limits), _maximum(limits)])
        if len(space) > max_graphs:
            break
        best = space
    return best


def table_buckets(limits: StepLimits, max_graphs: int) -> BucketSpace:
    """A ladder for the native kernel: 1, 2, 4 .. requests that decode, then more and more tokens.

    With fewer graphs than that it keeps the largest sizes of each kind in turn.
    """
    largest = limits.tokens, limits.seqs
    decode = [(size, size) for size in _doubling(1, limits.seqs)]
    prefill = [(size, limits.seqs) for size in _doubling(2 * limits.seqs, limits.tokens)]
    decode, prefill = decode[::-1], [shape for shape in prefill[::-1] if shape != largest]
    kept = [largest]
    while len(kept) < max_graphs and (decode or prefill):
        kept.append((decode if len(decode) >= len(prefill) else prefill).pop(0))
    return explicit(TABLE_AXES, kept)


def table_cost(linear: float, head: float) -> Callable[[Mapping[str, int]], float]:
    """Relative cost of a bucket of tokens and requests: padded requests read nothing.

    Args:
        linear: operations of one token outside attention.
        head: operations of one row of logits.
    """
    return lambda bucket: linear * bucket["tokens"] + head * bucket["requests"]


def step_cost(
    linear: float, attention: float, block_size: int
) -> Callable[[Mapping[str, int]], float]:
    """Relative cost of a bucket, for the choice of the cheapest, in floating point operations.

    A unique block is read by products with a single row, at about a sixth of the rate of the
    matmuls, so it counts six times.

    Args:
        linear: operations of one token outside attention (twice the weights it meets).
        attention: operations of one query with one key, over all layers.
        block_size: keys in a block.
    """

    def cost(bucket: Mapping[str, int]) -> float:
        keys = bucket["tokens"] + bucket["shared"] * block_size
        pairs = bucket["tokens"] * keys + 6 * bucket["unique"] * block_size
        return linear * bucket["tokens"] + attention * pairs + bucket["logits"]

    return cost


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
    return limits.tokens, limits.shared_blocks, limits.pool_blocks, limits.seqs


def _one_context(limits: StepLimits) -> int:
    return min(limits.context_blocks, limits.pool_blocks)


def _share(maximum: int, share: float) -> int:
    return max(1, math.ceil(maximum * share))


def _doubling(first: int, last: int) -> list[int]:
    """``first, 2 * first, ..`` below ``last``, then ``last``; nothing above it."""
    sizes = [first * 2**n for n in range(64) if first * 2**n < last]
    return [*sizes, last]
