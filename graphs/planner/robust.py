"""Buckets for the worst of several demands, and nowhere worse than the best ladder of their number.

Candidates are plans for mixtures of the scenarios, in which those that fare badly get more weight
from round to round (multiplicative weights: Freund and Schapire, 1999), and the ladders; the best
of these also with the graphs that it never uses spent on what saves most. A ladder is among them,
so what is chosen cannot be worse than it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from graphs.buckets.ladders import exponential, linear
from graphs.buckets.space import BucketSpace
from graphs.planner.cells import CostOf
from graphs.planner.choose import grow, improve, start
from graphs.planner.demand import Demand, Floats, Points
from graphs.planner.drift import PickOrder, Trial, by_cost
from graphs.planner.first_fit import mended
from graphs.planner.fit import fitted, guarded
from graphs.planner.guard import guard
from graphs.planner.problem import Budget, Expenses, Problem
from graphs.planner.region import Region
from graphs.planner.scenarios import Scenarios

__all__ = ["Task", "fitting_ladders", "planned", "robust", "sizes_of", "usual_ladders"]

_ROUNDS = 2
_GUARD_SHARE = 1 / 6
_MORE_THAN_ASKED = 2.0  # a guard that is not reached counts as equal up to here
_MOST = 4096  # buckets of a product before those that no need reaches are left out
_SLACK = 1e-9


class Task(NamedTuple):
    """All that a choice of buckets depends on.

    Args:
        region: of legal needs.
        limits: the budget.
        rho: the guard's multiple, or None.
        order: by which the engine picks.
        cost: of points.
        problem: of a demand.
    """

    region: Region
    limits: Budget
    rho: float | None
    order: PickOrder
    cost: CostOf
    problem: Callable[[Demand], Problem]


class _Found(NamedTuple):
    buckets: Points
    guards: int
    wastes: Floats


def planned(task: Task, problem: Problem) -> tuple[Points, int]:
    """Buckets for one demand ``[k, axes]``, and how many of them are there for the guard alone."""
    if task.rho is None:
        buckets, guards = fitted(problem, task.limits), 0
    else:
        buckets, guards = guarded(problem, task.region, task.limits, task.rho)
    return (buckets, guards) if task.order is by_cost else (mended(problem, buckets, task.order), 0)


def robust(
    task: Task, scenarios: Scenarios, trial: Trial, ladders: Mapping[str, Points]
) -> tuple[Points, int]:
    """The chosen buckets ``[k, axes]``, and how many of them are there for the guard alone."""
    rivals = [_Found(each, 0, trial.wastes(each)) for each in ladders.values()]
    reference = min(rivals, key=lambda each: each.wastes.max(), default=None)
    found = [*_candidates(task, scenarios, trial, reference), *rivals]
    if reference is not None:
        found = [each for each in found if (each.wastes <= reference.wastes + _SLACK).all()]
    guards = [_guard(task, each) for each in found]
    bearable = _MORE_THAN_ASKED * max(min(guards), task.rho or 0.0)

    def merit(at: int) -> tuple[bool, bool, float, float]:
        wastes = found[at].wastes
        is_beaten = any((wastes > each.wastes + _SLACK).any() for each in rivals)
        return is_beaten, guards[at] > bearable, float(wastes.max()), float(wastes[0])

    best = found[min(range(len(found)), key=merit)]
    return best.buckets, best.guards


def fitting_ladders(
    ladders: Mapping[str, Points], region: Region, expenses: Expenses
) -> dict[str, Points]:
    """The ladders with the maximum added, as far as they keep within the budget."""
    found = {}
    for name, ladder in ladders.items():
        inside = ladder[(ladder <= region.top).all(axis=1)]
        whole = np.unique(np.concatenate([inside, region.top[None]]), axis=0)
        if (expenses.of(whole).sum(axis=0) <= 1 + _SLACK).all():
            found[name] = whole
    return found


def _candidates(
    task: Task, scenarios: Scenarios, trial: Trial, reference: _Found | None
) -> Iterator[_Found]:
    first = np.zeros(len(scenarios.names))
    first[0] = 1.0
    yield _planned(task, scenarios, trial, first)
    shares = np.full(len(first), 1.0 / len(first))
    for _ in range(_ROUNDS):
        yield (found := _planned(task, scenarios, trial, shares))
        shares = shares * np.exp(found.wastes / max(float(found.wastes.max()), 1e-12))
        shares = shares / shares.sum()
    if reference is not None:
        problem = task.problem(scenarios.demand(task.region.names, shares))
        for buckets in _enriched(task, problem, trial.used(reference.buckets)):
            yield _Found(buckets, 0, trial.wastes(buckets))


def _planned(task: Task, scenarios: Scenarios, trial: Trial, shares: Floats) -> _Found:
    buckets, guards = planned(task, task.problem(scenarios.demand(task.region.names, shares)))
    return _Found(buckets, guards, trial.wastes(buckets))


def _enriched(task: Task, problem: Problem, used: Points) -> Iterator[Points]:
    """A ladder without the graphs that nothing uses, and better ones in their place."""
    rest = used[(used < problem.top).any(axis=1)]
    if task.order is not by_cost:
        yield mended(problem, np.concatenate([problem.top[None], rest]), task.order)
        return
    serving = start(problem, rest)
    spent = problem.expenses.of(serving.buckets).sum(axis=0)
    reserve = 0.0 if task.rho is None else _GUARD_SHARE
    grow(problem, serving, np.maximum(1.0 - spent - reserve, 0.0))
    yield _with_guard(task, problem, serving.buckets)
    spent = problem.expenses.of(serving.buckets).sum(axis=0)
    improve(problem, serving, np.maximum(1.0 - spent - reserve, 0.0))
    yield _with_guard(task, problem, serving.buckets)


def _with_guard(task: Task, problem: Problem, buckets: Points) -> Points:
    """With what is left of a number of graphs spent on a guard, and then on what saves."""
    if task.rho is not None and task.limits.graphs is not None and problem.expenses.counts_only:
        most = task.limits.graphs - len(buckets)
        added, _ = guard(task.region, task.cost, buckets, task.rho, most)
        buckets = np.concatenate([buckets, added])
    serving = start(problem, buckets[(buckets < problem.top).any(axis=1)])
    grow(problem, serving, 1.0 - problem.expenses.of(serving.buckets).sum(axis=0))
    return np.asarray(np.unique(serving.buckets, axis=0))


def _guard(task: Task, each: _Found) -> float:
    """How many times its own cost any legal need pays at most; 1 where no guard is asked for."""
    if task.rho is None:
        return 1.0
    costs, ranks = task.cost(each.buckets), task.order(each.buckets, task.cost)
    return task.region.worst(each.buckets, costs, task.cost, ranks)


def usual_ladders(region: Region, limits: Budget) -> dict[str, Points]:
    """Linear and exponential ladders with as many sizes on each axis as the graphs allow.

    Buckets that are no legal need themselves are left out; the maximum is always there.
    """
    tops = dict(zip(region.names, region.top.tolist(), strict=True))
    makers: Mapping[str, Callable[[int], BucketSpace]] = {
        "linear": lambda n: linear(**{name: _steps(top, n) for name, top in tops.items()}),
        "exponential": lambda n: exponential(
            **{name: (min(1, top), top, n) for name, top in tops.items()}
        ),
    }
    found = {name: _largest(make, region, limits.graphs or 64) for name, make in makers.items()}
    return {name: ladder for name, ladder in found.items() if len(ladder)}


def sizes_of(space: BucketSpace, names: tuple[str, ...]) -> Points:
    """The buckets of a space ``[k, axes]``, with the axes in this order."""
    return np.array([[bucket[name] for name in names] for bucket in space], np.int64)


def _steps(top: int, count: int) -> tuple[int, int, int]:
    step = max(1, -(-top // count))
    return min(step, top), step, top


def _largest(make: Callable[[int], BucketSpace], region: Region, most: int) -> Points:
    best: Points = np.zeros((0, len(region.names)), np.int64)
    for count in range(1, most + 1):
        space = make(count)
        if len(space) > _MOST:
            break
        sizes = sizes_of(space, region.names)
        kept = np.unique([*sizes[region.allows(sizes)], region.top], axis=0)
        if len(kept) > most:
            break
        if len(kept) >= len(best):
            best = kept
    return best
