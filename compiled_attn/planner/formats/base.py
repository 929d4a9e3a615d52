"""The parts of an engine that buckets are planned for, and a plan of all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from compiled_attn.planner import CostModel, Demand, Judgement, PlanReport, by_cost, judge
from compiled_attn.planner.drift import PickOrder
from compiled_attn.planner.simulator.kinds import Family
from compiled_attn.planner.simulator.simulate import SimulatedEngine
from compiled_attn.planner.simulator.steps import SimulatedSteps
from graphs.buckets.axes import Axis
from graphs.buckets.ladders import explicit
from graphs.buckets.space import BucketSpace

__all__ = ["EnginePart", "EnginePlan", "Limits", "Written", "part_of_sizes"]

Written = Callable[[Mapping[str, "EnginePlan"]], str]
"""Plans by the name of their part -> the text of the engine's file or option."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What an engine was started with.

    Args:
        max_seqs: requests that run at the same time at most (``--max-num-seqs``).
        max_tokens: tokens of a step at most (``--max-num-batched-tokens``).
        block_size: tokens of a block.
        blocks: blocks of the cache.
        context: the longest request (``--max-model-len``).
    """

    max_seqs: int
    max_tokens: int
    block_size: int
    blocks: int
    context: int

    @property
    def engine(self) -> SimulatedEngine:
        """The engine that is simulated for a trace."""
        return SimulatedEngine(self.max_tokens, self.max_seqs, self.block_size, self.blocks)

    @property
    def longest(self) -> int:
        """Blocks of the longest request."""
        return min(math.ceil(self.context / self.block_size), self.blocks)


@dataclass(frozen=True)
class EnginePart:
    """Steps of one kind, which an engine has buckets of their own for.

    Args:
        name: such as ``decode``.
        family: axes, legal needs and cost, here what is padded.
        default: the ladder that the engine captures unless it is told otherwise.
        order: by which the engine picks among buckets that hold a need.
        beyond: what the engine does with a step that no bucket holds.
        units: of each axis, as multiples of what is simulated; None: 1 each.
    """

    name: str
    family: Family
    default: BucketSpace
    order: PickOrder = by_cost
    beyond: str = "runs eagerly, unpadded"
    units: tuple[int, ...] | None = None

    def measured(self, needs: Demand) -> Demand:
        """What was simulated, over the part's axes and in its units."""
        if self.units is None:
            return needs.project(self.family.names)
        points = -(-needs.points // np.array(self.units))
        return Demand(self.family.names, points, needs.weights)

    def judge(self, space: BucketSpace, demand: Demand) -> Judgement:
        """What buckets waste, picked by the engine's own rule."""
        return judge(space.with_cost(self.family.cost), demand, self.family.cost, self.order)


def part_of_sizes(
    name: str, kind: str, axis: str, sizes: Sequence[int], steps: type[SimulatedSteps]
) -> EnginePart:
    """Steps that an engine pads along one axis, counted in its units; larger ones run unpadded.

    Args:
        name: of the part.
        kind: under which ``steps`` counts them.
        axis: such as ``tokens``.
        sizes: of the engine's default ladder, ascending.
        steps: what a step computes.
    """
    whole = Axis(axis, 1, sizes[-1])
    cost = CostModel(lambda need: need[axis])
    family = Family(kind, (whole,), lambda need: need[axis] >= 1, cost, steps=steps)
    return EnginePart(name, family, explicit([whole], sizes))


@dataclass(frozen=True)
class EnginePlan:
    """The plan of one part, beside the engine's ladder, judged on steps that it was not made for.

    Args:
        part: of the engine.
        report: the plan that is written, made for all steps.
        ours: the plan of the first half, on the second.
        theirs: the engine's default ladder, on the second half.
        outside: share of the steps that are larger than any bucket.
    """

    part: EnginePart
    report: PlanReport
    ours: Judgement
    theirs: Judgement
    outside: float
