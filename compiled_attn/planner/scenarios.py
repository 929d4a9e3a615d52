"""Scenarios: what tomorrow's demand may be, resampled and shifted from what was recorded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from compiled_attn.planner.cells import CostOf
from compiled_attn.planner.demand import Demand, Floats, Points
from compiled_attn.planner.region import Region

__all__ = ["RareKind", "Scenarios", "rare_kinds", "scenarios_of"]

_PERIODS = 16
_RESAMPLES = 3
_OFTENER = 6.0
_COSTLIEST, _MORE_OF_THEM = 0.2, 3.0
_STRETCHED = (1.25, 0.8)
_ANYTHING, _BOXES = 0.1, 1000


@dataclass(frozen=True)
class Scenarios:
    """Demands over the same needs, in each of which these weigh differently.

    Shape (n needs, m scenarios): points ``[n, axes]``, weights ``[m, n]``, from 0 on. The first is
    the demand as it was recorded.
    """

    names: tuple[str, ...]
    points: Points
    weights: Floats

    def each(self, axes: tuple[str, ...]) -> Iterator[tuple[str, Demand]]:
        """The demands by name."""
        for name, weights in zip(self.names, self.weights, strict=True):
            some = weights > 0
            yield name, Demand(axes, self.points[some], weights[some])


@dataclass(frozen=True)
class RareKind:
    """Steps that an axis sets apart: those that need some of it, or none.

    Args:
        name: such as ``shared > 0``.
        share: of the recorded steps.
        axis: which one, by its place.
        some: whether they need some of it.
    """

    name: str
    share: float
    axis: int
    some: bool

    def holds(self, points: Points) -> NDArray[np.bool_]:
        """Which needs ``[n, axes]`` are of the kind: ``[n]``."""
        found: NDArray[np.bool_] = (points[:, self.axis] > 0) == self.some
        return found


def scenarios_of(demand: Demand, region: Region, cost: CostOf, seed: int) -> Scenarios:
    """The demand, and what it may become: each scenario costs 1 where no need is padded.

    - *resampled*: the record is cut into 16 periods, and these are weighed at random (a Bayesian
      bootstrap of periods: Rubin, 1981), as other days have more of one hour than of another;
    - *oftener*: a rare kind of steps (such as those that read shared blocks) has six times its
      odds;
    - *costlier*: the costliest fifth of the steps occurs three times as often;
    - *stretched*: all sizes are a quarter larger, or a fifth smaller, as far as that is legal;
    - *anything*: a tenth of the cost is that of any legal steps, all ratios equally likely.
    """
    own = cost(demand.points)
    parts = [(name, demand.points, w) for name, w in _reweighed(demand, own, seed)]
    parts += [
        (f"sizes x {factor:g}", _stretched(demand, region, factor), demand.weights)
        for factor in _STRETCHED
    ]
    parts.append(("a tenth of anything", *_with_anything(demand, region, cost)))
    points = np.unique(np.concatenate([points for _, points, _ in parts]), axis=0)
    weights = np.stack([_weights(points, each, w) for _, each, w in parts])
    paid = weights @ cost(points)
    weights = weights / np.where(paid > 0, paid, 1.0)[:, None]
    return Scenarios(tuple(name for name, _, _ in parts), points, weights)


def _weights(points: Points, some: Points, weights: Floats) -> Floats:
    """The weights ``[n]`` of distinct points in order, given those of ``some`` of them."""
    together = np.concatenate([points, some])
    _, which = np.unique(together, axis=0, return_inverse=True)
    return np.bincount(which.reshape(-1)[len(points) :], weights, len(points)).astype(np.float64)


def _with_anything(demand: Demand, region: Region, cost: CostOf) -> tuple[Points, Floats]:
    """The demand, and legal needs all over the region that cost a ninth of it, each the same."""
    boxes = np.unique(region.grid(_BOXES).high, axis=0)
    boxes = boxes[region.allows(boxes)]
    costs = cost(boxes)
    boxes, costs = boxes[costs > 0], costs[costs > 0]
    if not len(boxes):
        return demand.points, demand.weights
    whole = float(cost(demand.points) @ demand.weights)
    each = _ANYTHING / (1 - _ANYTHING) * whole / len(boxes) / costs
    return np.concatenate([demand.points, boxes]), np.concatenate([demand.weights, each])


def rare_kinds(demand: Demand) -> list[RareKind]:
    """Of each axis with and without sizes of 0, the rarer side."""
    kinds = []
    for axis, name in enumerate(demand.names):
        share = float(demand.weights[demand.points[:, axis] > 0].sum() / demand.total)
        if 0 < share <= 0.5:
            kinds.append(RareKind(f"{name} > 0", share, axis, some=True))
        elif 0.5 < share < 1:
            kinds.append(RareKind(f"{name} = 0", 1 - share, axis, some=False))
    return kinds


def _reweighed(demand: Demand, own: Floats, seed: int) -> Iterator[tuple[str, Floats]]:
    yield "as recorded", demand.weights
    rng = np.random.default_rng(seed)
    period = np.minimum(
        (demand.weights.cumsum() / demand.total * _PERIODS).astype(np.int64), _PERIODS - 1
    )
    for number in range(1, 1 + _RESAMPLES):
        yield f"resampled {number}", demand.weights * rng.exponential(size=_PERIODS)[period]
    for kind in rare_kinds(demand):
        factors = np.where(kind.holds(demand.points), _OFTENER, 1.0)
        yield f"{kind.name} oftener", demand.weights * factors
    order = np.argsort(-own, kind="stable")
    costly = order[demand.weights[order].cumsum() <= _COSTLIEST * demand.total]
    factors = np.ones(len(demand))
    factors[costly] = _MORE_OF_THEM
    yield "costlier", demand.weights * factors


def _stretched(demand: Demand, region: Region, factor: float) -> Points:
    low = np.array([axis.low for axis in region.axes])
    moved = np.clip(np.ceil(demand.points * factor).astype(np.int64), low, region.top)
    moved = np.where(demand.points > 0, moved, demand.points)
    return np.where(region.allows(moved)[:, None], moved, demand.points)
