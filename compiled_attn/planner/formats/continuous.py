"""Continuous batching of transformers: two intervals, up to whose multiples steps are padded.

As in transformers 5.23 and 5.24 (``generation/continuous_batching``: ``maybe_pad_inputs`` in
``model_runner.py``, ``pad_to_interval`` and ``pad_to_pow2`` in ``utils.py``, defaults in
``initialization.py``). A step with a prompt is padded in tokens and in cached tokens that its
requests read, each to a multiple of an interval or to the maximum. A step of decodes alone is
padded to a power of two requests, whatever is configured. Graphs of prompts are captured when they
are first needed, one more for each power of two of the longest request from 1,024 tokens on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from compiled_attn.engine.scheduler import ScheduledTokens
from compiled_attn.planner import CostModel, Demand, PlanReport, judge
from compiled_attn.planner.formats.base import EnginePart
from compiled_attn.planner.pick import PickOrder
from compiled_attn.planner.region import Region
from compiled_attn.planner.simulator.engine import SimulatedEngine
from compiled_attn.planner.simulator.kinds import StepKind
from compiled_attn.planner.simulator.simulated_steps import SimulatedSteps
from graphs.buckets.ladders import explicit
from graphs.buckets.space import Axis, BucketSpace

__all__ = ["decode_ladder", "multiples", "parts", "write"]

_TOKENS, _CACHED = 64, 64 * 256  # default intervals
_ALIGNED = 8  # tokens that an interval of a plan is a multiple of


class ContinuousSteps(SimulatedSteps):
    """Steps of decodes alone, and all others by tokens and the cached tokens that they read.

    Cached tokens count once for each request that reads them.
    """

    axes: ClassVar = {"varlen": ("tokens", "cached"), "decode": ("sequences",)}

    def record(self, step: Sequence[ScheduledTokens]) -> float:
        """Record what a step needs; returns its seconds."""
        time = self.engine.time
        tokens = sum(part.count for part in step)
        cached = sum(part.sequence.computed for part in step)
        if tokens == len(step):
            self.needs["decode"].append((tokens,))
            return time.base + time.token * tokens + time.block_slot * cached
        self.needs["varlen"].append((tokens, cached))
        return time.base + tokens * (time.token + time.pair * (tokens + cached))


def multiples(interval: int, most: int) -> list[int]:
    """Return the sizes of an axis: multiples of the interval below the maximum, and that."""
    return [*range(interval, most, interval), most]


def decode_ladder(engine: SimulatedEngine) -> list[int]:
    """Return the sizes of decodes: powers of two below the most requests, and these."""
    return [*(1 << bit for bit in range((engine.max_seqs - 1).bit_length())), engine.max_seqs]


def parts(engine: SimulatedEngine, context: int) -> list[EnginePart]:
    """Return the steps with prompts, for which a plan has two intervals, and decodes."""
    time = engine.time
    axes = (Axis("tokens", 1, engine.max_tokens), Axis("cached", 0, _most_cached(engine)))
    prompts = StepKind(
        "varlen",
        axes,
        lambda need: need["tokens"] >= 1,
        CostModel(
            lambda need: (
                need["tokens"] * (time.token + time.pair * (need["tokens"] + need["cached"]))
            )
        ),
        steps=ContinuousSteps,
    )
    whole = Axis("sequences", 1, engine.max_seqs)
    decodes = StepKind(
        "decode",
        (whole,),
        lambda need: need["sequences"] >= 1,
        CostModel(lambda need: need["sequences"] * time.token),
        steps=ContinuousSteps,
    )
    default = _grid(axes, (_TOKENS, _CACHED))
    return [
        EnginePart("prompt", prompts, default, choose=_choose_intervals),
        EnginePart("decode", decodes, explicit([whole], decode_ladder(engine)), choose=_choose_own),
    ]


def write(plans: Mapping[str, PlanReport], engine: SimulatedEngine) -> str:
    """Return the arguments of a ``ContinuousBatchingConfig`` as JSON."""
    tokens, cached = (
        min(bucket[axis] for bucket in plans["prompt"].space) for axis in ("tokens", "cached")
    )
    return json.dumps(
        {
            "use_cuda_graph": True,
            "q_padding_interval_size": tokens,
            "kv_padding_interval_size": cached,
            "max_batch_tokens": engine.max_tokens,
            "max_requests_per_batch": engine.max_seqs,
            "page_size": engine.block_size,
            "num_blocks": engine.blocks,
        }
    )


def _choose_intervals(
    demand: Demand,
    cost: CostModel,
    budget: int,
    *,
    axes: Sequence[Axis],
    legal: Any,
    rho: float | None,
    order: PickOrder,
    ladder: BucketSpace,
    unseen: Demand | None = None,
) -> PlanReport:
    """The pair of intervals with at most `budget` pairs of sizes that wastes least; see `plan`."""
    region = Region.of(demand, axes, legal)
    needs = demand.project(region.names).histogram()

    def report(space: BucketSpace, *, is_ladder: bool = False) -> PlanReport:
        space = space.with_cost(cost)
        judged = judge(space, demand, cost, order)
        buckets = np.array([bucket.sizes for bucket in space], np.int64)
        guard = region.worst(buckets, lambda points: cost.of(region.names, points), order)
        return PlanReport(
            space, cost, judged.waste, guard, rho, judged.uses, order=order, is_ladder=is_ladder
        )

    def paid(intervals: tuple[int, ...]) -> float:
        sizes = np.maximum(-(-needs.points // intervals), 1) * intervals
        return float(cost.of(region.names, np.minimum(sizes, region.top)) @ needs.weights)

    chosen = report(_grid(axes, min(_pairs(axes, budget), key=paid)))
    if len(ladder) > budget:
        return chosen
    theirs = report(ladder, is_ladder=True)
    judging = demand if unseen is None else unseen
    return theirs if theirs.judge(judging).waste < chosen.judge(judging).waste else chosen


def _choose_own(
    demand: Demand, cost: CostModel, budget: int, *, ladder: BucketSpace, **others: Any
) -> PlanReport:
    """The engine's own sizes, which cannot be configured."""
    space = ladder.with_cost(cost)
    judged = judge(space, demand, cost, others["order"])
    return PlanReport(
        space, cost, judged.waste, judged.worst, None, judged.uses, order=others["order"],
        is_ladder=True,
    )  # fmt: skip


def _pairs(axes: Sequence[Axis], budget: int) -> Iterator[tuple[int, int]]:
    """Pairs of intervals with at most `budget` pairs of sizes."""
    tokens, cached = (axis.high for axis in axes)
    for interval in _intervals(tokens, budget):
        left = budget // len(multiples(interval, tokens))
        yield from ((interval, other) for other in _intervals(cached, left))


def _intervals(most: int, count: int) -> list[int]:
    """Intervals for 1 to `count` sizes, each once."""
    steps = (math.ceil(most / sizes / _ALIGNED) * _ALIGNED for sizes in range(1, count + 1))
    return list(dict.fromkeys(min(most, step) for step in steps))


def _grid(axes: Sequence[Axis], intervals: tuple[int, int]) -> BucketSpace:
    columns = [multiples(each, axis.high) for each, axis in zip(intervals, axes, strict=True)]
    return explicit(axes, [(tokens, cached) for tokens in columns[0] for cached in columns[1]])


def _most_cached(engine: SimulatedEngine) -> int:
    return engine.block_size * engine.blocks
