"""Formats of other engines: the parts of an engine that have buckets, and the syntax of these."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from compiled_attn.planner import CostModel, Demand, PlanReport, by_cost, plan
from compiled_attn.planner.judge import BucketUse
from compiled_attn.planner.pick import PickOrder
from compiled_attn.planner.simulator.engine import SimulatedEngine
from compiled_attn.planner.simulator.kinds import StepKind
from compiled_attn.planner.simulator.ladders import SplitPlan
from compiled_attn.planner.simulator.simulated_steps import SeparateSteps, SimulatedSteps
from graphs.buckets.ladders import explicit
from graphs.buckets.space import Axis, BucketSpace

__all__ = ["EnginePart", "Format", "of_sizes", "thinned"]

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
        choose: chooses the buckets, with the arguments of `plan`.
    """

    name: str
    kind: StepKind
    default: BucketSpace
    order: PickOrder = by_cost
    units: tuple[int, ...] | None = None
    choose: Callable[..., PlanReport] = plan

    def measure(self, needs: Demand) -> Demand:
        """Convert simulated needs to the part's axes and units."""
        if self.units is None:
            return needs.project(self.kind.names)
        points = -(-needs.points // np.array(self.units))
        return Demand(self.kind.names, points, needs.weights)

    def plan(self, needs: Demand, max_graphs: int, rho: float | None) -> SplitPlan:
        """Plan for needs of the part, see `SplitPlan`."""
        return SplitPlan(self.kind, needs, self.default, max_graphs, rho, self.order, self.choose)


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
        captures: how many buckets the device can capture, of the model's layers, the communication
            groups and the device's streams; None: it has no such limit.
        is_grid: the engine captures each combination of the parts' sizes.
    """

    package: str
    tested: tuple[str, ...]
    parts: Callable[[SimulatedEngine, int], list[EnginePart]]
    write: Callable[[Mapping[str, PlanReport], SimulatedEngine], str]
    use: str
    beyond: str = "runs eagerly, unpadded"
    captures: Callable[[int, int, int], int] | None = None
    is_grid: bool = False

    def plans(
        self,
        parts: Sequence[EnginePart],
        needs: Mapping[str, Demand],
        max_graphs: int,
        rho: float | None,
    ) -> dict[str, SplitPlan]:
        """Plan each part; together they capture at most ``max_graphs`` graphs.

        Parts get shares in proportion to the engine's own ladders. The two parts of a grid get
        numbers of sizes whose product is within ``max_graphs``, chosen by the cost of the second
        half of the steps.

        Raises:
            ValueError: fewer graphs than parts.
        """

        def planned(counts: Sequence[int]) -> dict[str, SplitPlan]:
            pairs = zip(parts, counts, strict=True)
            return {part.name: part.plan(needs[part.name], count, rho) for part, count in pairs}

        if not self.is_grid:
            return planned(_shares([len(part.default) for part in parts], max_graphs))
        most = (1 << bit for bit in range(max_graphs.bit_length()))
        trials = (planned((max_graphs // count, count)) for count in most)
        return min(trials, key=lambda plans: sum(plan.paid for plan in plans.values()))


def _shares(sizes: Sequence[int], count: int) -> list[int]:
    if count < len(sizes):
        raise ValueError(
            f"expected --max-graphs of at least {len(sizes)}: one for each kind of step"
        )
    found: list[int] = []
    for number, size in enumerate(sizes, start=1):
        left, others = count - sum(found), len(sizes) - number
        share = max(1, round(count * size / sum(sizes)))
        found.append(min(share, left - others) if others else left)
    return found


def thinned(part: EnginePart, most: int) -> EnginePart:
    """Return the part with at most ``most`` sizes of its ladder, evenly from first to last.

    The last alone stays if there is room for one.
    """
    buckets = list(part.default)
    if len(buckets) <= most:
        return part
    step = (len(buckets) - 1) / max(most - 1, 1)
    kept = [buckets[round(at * step)] for at in range(most - 1)] + [buckets[-1]]
    return replace(part, default=explicit(part.default.axes, kept))


def of_sizes(
    package: str,
    tested: tuple[str, ...],
    axis: str,
    sizes: Callable[[SimulatedEngine], Sequence[int]],
    write: Callable[[Sequence[int], Sequence[BucketUse]], str],
    use: str,
    captures: Callable[[int, int, int], int] | None = None,
) -> Format:
    """Return the format of an engine that pads steps along one axis to the smallest size that fits.

    Args:
        package, tested, use, captures: see `Format`.
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

    return Format(package, tested, parts, text, use, captures=captures)
