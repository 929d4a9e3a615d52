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

__all__ = ["AXES", "StepLimits", "default_buckets", "step_cost"]

AXES = ("tokens", "shared", "unique", "logits")


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest step that the scheduler can make."""

    tokens: int
    seqs: int
    context_blocks: int
    pool_blocks: int


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
    tokens, shared_max, pool, seqs = _maximum(limits)
    fine = [_share(shared_max, step / 2**octave) for octave in range(12) for step in (1, 0.75)]
    for number, shared in enumerate(fine[:points]):
        yield tokens, shared, _share(pool, 3 / 16), seqs
        if number % 2 == 0:
            yield tokens, shared, _share(pool, 3 / 4), seqs


def _decode(limits: StepLimits) -> Iterator[tuple[int, ...]]:
    _, shared_max, pool, seqs = _maximum(limits)
    for few, blocks in ((1 / 4, 1 / 16), (1 / 2, 1 / 8), (1, 1 / 4), (1, 1 / 2)):
        requests = _share(seqs, few)
        yield requests, _share(shared_max, 1 / 32), _share(pool, blocks), requests
    yield seqs, shared_max, pool, seqs


def _maximum(limits: StepLimits) -> tuple[int, int, int, int]:
    shared = min(limits.context_blocks, limits.pool_blocks)
    return limits.tokens, shared, limits.pool_blocks, limits.seqs


def _share(maximum: int, share: float) -> int:
    return max(1, math.ceil(maximum * share))
