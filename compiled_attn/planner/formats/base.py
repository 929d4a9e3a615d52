"""Parts of an engine that have buckets of their own, and the plan of a part."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from compiled_attn.planner import CostModel, Demand, Judgement, PlanReport, by_cost, judge
from compiled_attn.planner.pick import PickOrder
from compiled_attn.planner.simulator.engine import SimulatedEngine
from compiled_attn.planner.simulator.kinds import StepKind
from compiled_attn.planner.simulator.simulated_steps import SimulatedSteps
from graphs.buckets.ladders import explicit
from graphs.buckets.space import Axis, BucketSpace

__all__ = ["EnginePart", "EnginePlan", "Limits", "Plans", "part_of_sizes"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Settings that an engine was started with.

    Args:
        max_seqs: requests that run at the same time at most (``--max-num-seqs``).
        max_tokens: tokens of a step at most (``--max-num-batched-tokens``).
        block_size: tokens of a block.
        blocks: number of blocks of the cache.
        context: longest request (``--max-model-len``).
    """

    max_seqs: int
    max_tokens: int
    block_size: int
    blocks: int
    context: int

    @property
    def engine(self) -> SimulatedEngine:
        """The simulated engine of these limits."""
        return SimulatedEngine(self.max_tokens, self.max_seqs, self.block_size, self.blocks)

    @property
    def longest(self) -> int:
        """Number of blocks of the longest request."""
        return math.ceil(self.context / self.block_size)


@dataclass(frozen=True)
class EnginePart:
    """Steps of one kind, for which an engine has a separate set of buckets.

    Args:
        name: such as ``decode``.
        kind: axes, legal needs and cost of the padded steps.
        default: the ladder that the engine captures by default.
        order: how the engine picks among buckets that fit.
        beyond: what the engine does with a step that fits no bucket.
        units: size of one unit of each axis in the simulation; None: 1 each.
    """

    name: str
    kind: StepKind
    default: BucketSpace
    order: PickOrder = by_cost
    beyond: str = "runs eagerly, unpadded"
    units: tuple[int, ...] | None = None

    def measure(self, needs: Demand) -> Demand:
        """Convert simulated needs to the part's axes and units."""
        if self.units is None:
            return needs.project(self.kind.names)
        points = -(-needs.points // np.array(self.units))
        return Demand(self.kind.names, points, needs.weights)

    def judge(self, space: BucketSpace, demand: Demand) -> Judgement:
        """Evaluate buckets by the engine's own rule of picking."""
        return judge(space.with_cost(self.kind.cost), demand, self.kind.cost, self.order)


def part_of_sizes(
    name: str, kind: str, axis: str, sizes: Sequence[int], steps: type[SimulatedSteps]
) -> EnginePart:
    """Return a part whose steps are padded along one axis to ascending default ``sizes``.

    Larger steps run unpadded. ``kind`` is the kind of the needs that ``steps`` records.
    """
    whole = Axis(axis, 1, sizes[-1])
    cost = CostModel(lambda need: need[axis])
    padded = StepKind(kind, (whole,), lambda need: need[axis] >= 1, cost, steps=steps)
    return EnginePart(name, padded, explicit([whole], sizes))


@dataclass(frozen=True)
class EnginePlan:
    """The plan of one part.

    Args:
        part: of the engine.
        report: the plan to write, made for all steps.
        ours: a plan made for the first half of the steps, evaluated on the second.
        theirs: the engine's default ladder, evaluated on the second half.
        outside: share of the steps that exceed every bucket.
    """

    part: EnginePart
    report: PlanReport
    ours: Judgement
    theirs: Judgement
    outside: float


Plans = Mapping[str, EnginePlan]
"""Plans by the name of their part."""
