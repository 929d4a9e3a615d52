"""Formats of other engines: the parts of an engine that have buckets, and the syntax of these."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from compiled_attn.planner import CostModel, Demand, PlanReport, by_cost
from compiled_attn.planner.judge import BucketUse
from compiled_attn.planner.pick import PickOrder
from compiled_attn.planner.simulator.engine import SimulatedEngine
from compiled_attn.planner.simulator.kinds import StepKind
from compiled_attn.planner.simulator.ladders import SplitPlan
from compiled_attn.planner.simulator.simulated_steps import SeparateSteps, SimulatedSteps
from graphs.buckets.ladders import explicit
from graphs.buckets.space import Axis, BucketSpace

__all__ = ["EnginePart", "Format", "of_sizes"]

_ONE_AXIS: Mapping[str, tuple[str, str, type[SimulatedSteps]]] = {
    "tokens": ("steps", "table", SimulatedSteps),
    "sequences": ("decode", "decode", SeparateSteps),
}
"""Name of the part, name of the simulated needs, and the simulation, by axis."""


@dataclass(frozen=True)
class EnginePart:
    """Steps of one kind, for which an engine has a separate set of buckets.

    Args:
        name: such as ``decode``.
        kind: axes, legal needs and cost of the padded steps.
        default: the ladder that the engine captures by default.
        order: how the engine picks among buckets that fit.
        units: size of one unit of each axis in the simulation; None: 1 each.
    """

    name: str
    kind: StepKind
    default: BucketSpace
    order: PickOrder = by_cost
    units: tuple[int, ...] | None = None

    def measure(self, needs: Demand) -> Demand:
        """Convert simulated needs to the part's axes and units."""
        if self.units is None:
            return needs.project(self.kind.names)
        points = -(-needs.points // np.array(self.units))
        return Demand(self.kind.names, points, needs.weights)

    def plan(self, needs: Demand, max_graphs: int, rho: float | None) -> SplitPlan:
        """Plan for needs of the part, see `SplitPlan`."""
        return SplitPlan(self.kind, needs, self.default, max_graphs, rho, self.order)


@dataclass(frozen=True)
class Format:
    """The format of an engine.

    Args:
        package: of the engine.
        tested: prefixes of the tested versions; empty: only its sources were read.
        parts: that have buckets, of an engine with these limits and this context (its longest
            request).
        write: formats plans, by the name of their part, as the engine reads them.
        use: how to pass that text to the engine, as a ``{file}``.
        beyond: what the engine does with a step that fits no bucket.
    """

    package: str
    tested: tuple[str, ...]
    parts: Callable[[SimulatedEngine, int], list[EnginePart]]
    write: Callable[[Mapping[str, PlanReport], SimulatedEngine], str]
    use: str
    beyond: str = "runs eagerly, unpadded"


def of_sizes(
    package: str,
    tested: tuple[str, ...],
    axis: str,
    sizes: Callable[[SimulatedEngine], Sequence[int]],
    write: Callable[[Sequence[int], Sequence[BucketUse]], str],
    use: str,
) -> Format:
    """Return the format of an engine that pads steps along one axis to the smallest size that fits.

    Args:
        package, tested, use: see `Format`.
        axis: ``"tokens"`` of all steps, or ``"sequences"`` of decodes, where prompts are padded by
            other rules or not at all.
        sizes: by default, ascending; larger steps run unpadded.
        write: formats ascending sizes, of which the uses are given.
    """
    name, kind, steps = _ONE_AXIS[axis]

    def parts(engine: SimulatedEngine, context: int) -> list[EnginePart]:
        whole = Axis(axis, 1, sizes(engine)[-1])
        cost = CostModel(lambda need: need[axis])
        padded = StepKind(kind, (whole,), lambda need: need[axis] >= 1, cost, steps=steps)
        return [EnginePart(name, padded, explicit([whole], sizes(engine)))]

    def text(plans: Mapping[str, PlanReport], engine: SimulatedEngine) -> str:
        return write(sorted(b[axis] for b in plans[name].space), plans[name].uses)

    return Format(package, tested, parts, text, use)
