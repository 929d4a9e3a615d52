"""The engine's default buckets: few graphs, no step without one.

A step that prefills is nearly full and reads the context of its prompt (shared blocks); a step that
only decodes is small and reads the blocks of many requests (unique blocks). So two groups of
buckets, each a product of short exponential ladders, hold nearly everything, and the exact maximum
holds the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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

    The number of points per axis grows until the budget is used up.
    """
    best = explicit(AXES, [_maximum(limits)])
    for points in range(1, 16):
        space = _ladder(limits, points)
        if len(space) > max_graphs:
            break
        best = space
    return best


def step_cost(
    linear: float, attention: float, block_size: int
) -> Callable[[Mapping[str, int]], float]:
    """Floating point operations of a bucket, for the choice of the cheapest.

    Args:
        linear: operations of one token outside attention (twice the weights it meets).
        attention: operations of one query with one key, over all layers.
        block_size: keys in a block.
    """

    def cost(bucket: Mapping[str, int]) -> float:
        keys = bucket["tokens"] + bucket["shared"] * block_size
        pairs = bucket["tokens"] * keys + bucket["unique"] * block_size
        return linear * bucket["tokens"] + attention * pairs + bucket["logits"]

    return cost


def _ladder(limits: StepLimits, points: int) -> BucketSpace:
    """Two products of geometric ladders, ``points`` steps on the axis that matters to each."""
    maximum = _maximum(limits)
    tokens, shared_max, unique_max, seqs = maximum
    shared = _down_from(shared_max, points)
    prefill = [
        (tokens, s, u, seqs) for s in shared for u in _down_from(unique_max, 1 + points // 3, 4)
    ]
    decode = [
        (few, shared[0], u, few)
        for few in _down_from(seqs, 2, 4)
        for u in _down_from(unique_max, points)
    ]
    return explicit(AXES, [*prefill, *decode, (seqs, shared_max, unique_max, seqs), maximum])


def _maximum(limits: StepLimits) -> tuple[int, int, int, int]:
    shared = min(limits.context_blocks, limits.pool_blocks)
    return limits.tokens, shared, limits.pool_blocks, limits.seqs


def _down_from(maximum: int, points: int, factor: int = 2) -> list[int]:
    return sorted({max(1, -(-maximum // factor**power)) for power in range(points)})
