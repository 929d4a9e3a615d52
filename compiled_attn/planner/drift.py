"""Drift: how a set of buckets fares on demands near the one that it was planned for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from compiled_attn.planner.cells import CostOf
from compiled_attn.planner.choose import cheapest
from compiled_attn.planner.demand import Floats, Points
from compiled_attn.planner.scenarios import RareKind, Scenarios

__all__ = ["DriftReport", "KindLimit", "Outcome", "PickOrder", "Trial", "by_cost", "by_size"]

PickOrder: TypeAlias = Callable[[Points, CostOf], Floats]
"""Ranks of buckets ``[k, axes]``: of those that hold a need, the engine takes the lowest."""


def by_cost(buckets: Points, cost: CostOf) -> Floats:
    """The cheapest bucket that holds a need, as `BucketSpace.pick` does."""
    return cost(buckets)


def by_size(buckets: Points, cost: CostOf) -> Floats:
    """The first that holds a need, in the order of the sizes: the first axis counts most."""
    ranks = np.empty(len(buckets))
    ranks[np.lexsort(buckets.T[::-1])] = np.arange(len(buckets))
    return ranks


@dataclass(frozen=True, slots=True)
class Outcome:
    """One demand near the recorded one, and what it wastes.

    Args:
        scenario: its name, such as ``shared > 0 oftener``.
        waste: of the plan.
        ladder: the name of the ladder of at most as many graphs that wastes least on it, or None.
        ladder_waste: what that one wastes.
    """

    scenario: str
    waste: float
    ladder: str | None
    ladder_waste: float


@dataclass(frozen=True, slots=True)
class KindLimit:
    """A rare kind of steps, and up to which share of them the plan wastes no more than a ladder.

    Args:
        kind: such as ``shared > 0``.
        share: of the recorded steps.
        limit: the largest share of the steps up to which no ladder of its size wastes less.
    """

    kind: str
    share: float
    limit: float

    def __str__(self) -> str:
        return f"{self.kind}: {self.share:.1%} of the steps, borne up to {self.limit:.0%}"


@dataclass(frozen=True, slots=True)
class DriftReport:
    """What drift a plan bears.

    Args:
        outcomes: the demand as recorded, then the resampled and shifted ones.
        limits: of each rare kind of steps.
        reference: the ladder whose worst waste is least; the plan is nowhere worse than it. None
            where no ladder fits the budget.
    """

    outcomes: tuple[Outcome, ...]
    limits: tuple[KindLimit, ...]
    reference: str | None

    @property
    def worst(self) -> Outcome:
        """The demand on which the plan wastes most."""
        return max(self.outcomes, key=lambda outcome: outcome.waste)

    @property
    def beaten(self) -> tuple[Outcome, ...]:
        """Where some ladder of its size, though not the same everywhere, wastes less."""
        return tuple(o for o in self.outcomes if o.waste > o.ladder_waste + 1e-9)

    def __str__(self) -> str:
        worst = self.worst
        first = f"drift: waste at most {worst.waste:.1%} on {len(self.outcomes)} demands near this"
        lines = [f"{first} ({worst.scenario})"]
        if self.reference is not None:
            lines[0] += f", nowhere above the {self.reference} ladder of as many graphs"
        lines += [
            f"on {o.scenario} the {o.ladder} ladder wastes {o.ladder_waste:.1%}, the plan "
            f"{o.waste:.1%}"
            for o in self.beaten
        ]
        return "\n".join([*lines, *map(str, self.limits)])


class Trial:
    """Buckets tried on scenarios.

    Args:
        scenarios: each costs 1 where nothing is padded.
        cost: of points.
        order: by which the engine picks among buckets that hold a need.
    """

    def __init__(self, scenarios: Scenarios, cost: CostOf, order: PickOrder) -> None:
        self._scenarios, self._cost, self._order = scenarios, cost, order
        self.points = scenarios.points
        self.count = len(scenarios.names)

    def paid(self, buckets: Points) -> Floats:
        """What each need pays: ``[n]``; the buckets hold all of them."""
        ranks = self._order(buckets, self._cost)
        return np.asarray(self._cost(buckets)[cheapest(buckets, ranks, self.points)])

    def wastes(self, buckets: Points) -> Floats:
        """The waste on each scenario: ``[m]``."""
        wastes: Floats = self._scenarios.weights @ self.paid(buckets) - 1.0
        return wastes

    def used(self, buckets: Points) -> Points:
        """Without the buckets that no need of any scenario goes to; the others serve as before."""
        ranks = self._order(buckets, self._cost)
        return buckets[np.unique(cheapest(buckets, ranks, self.points))]

    def report(
        self, buckets: Points, ladders: dict[str, Points], kinds: Sequence[RareKind]
    ) -> DriftReport:
        """What the buckets bear, beside the ladders by name."""
        ours = self.wastes(buckets)
        theirs = {name: self.wastes(each) for name, each in ladders.items()}
        best = [min(theirs, key=lambda n: theirs[n][at], default=None) for at in range(len(ours))]
        outcomes = tuple(
            Outcome(name, float(waste), ladder, float(theirs[ladder][at]) if ladder else np.inf)
            for at, (name, waste, ladder) in enumerate(
                zip(self._scenarios.names, ours, best, strict=True)
            )
        )
        reference = min(theirs, key=lambda name: theirs[name].max(), default=None)
        limits = tuple(self._limit(kind, buckets, [*ladders.values()]) for kind in kinds)
        return DriftReport(outcomes, limits, reference)

    def _limit(self, kind: RareKind, buckets: Points, ladders: Sequence[Points]) -> KindLimit:
        """What is paid is a mixture of the kind's and the others', so it turns at one share."""
        weights, rare = self._scenarios.weights[0], kind.holds(self.points)
        ours, limit = self.paid(buckets), 1.0
        for ladder in ladders:
            saved = (self.paid(ladder) - ours) * weights
            on_kind = saved[rare].sum() / kind.share
            elsewhere = saved[~rare].sum() / (1 - kind.share)
            if on_kind < 0:  # at a share s it saves s * on_kind + (1 - s) * elsewhere
                limit = min(limit, max(0.0, elsewhere) / (max(0.0, elsewhere) - on_kind))
        return KindLimit(kind.name, kind.share, float(limit))
