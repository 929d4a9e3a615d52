"""Buckets for the worst of several demands, and nowhere worse than the best ladder of their number.

Candidates are plans for mixtures of the scenarios, in which those that fare badly get more weight
from round to round (multiplicative weights: Freund and Schapire, 1999). Where a ladder wastes less
on any of them, the ladders are candidates too, and the best of these with the graphs that it never
uses spent on what saves most: so what is chosen cannot be worse than it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from compiled_attn.planner.cells import CostOf
from compiled_attn.planner.choose import grow, improve, start
from compiled_attn.planner.demand import Floats, Points
from compiled_attn.planner.drift import PickOrder, Trial, by_cost
from compiled_attn.planner.first_fit import mended
from compiled_attn.planner.fit import Fit, fitted, guarded
from compiled_attn.planner.guard import guard
from compiled_attn.planner.problem import Budget, Expenses, Problem
from compiled_attn.planner.region import Region
from graphs.buckets.ladders import exponential, linear
from graphs.buckets.space import BucketSpace

__all__ = ["Task", "fitting_ladders", "planned", "robust", "sizes_of", "usual_ladders"]

_ROUNDS = 4
_GUARD_SHARE = 1 / 6
_MORE_THAN_ASKED = 2.0  # a guard that is not reached counts as equal up to here
_MOST = 4096  # buckets of a product before those that no need reaches are left out
_SLACK = 1e-9


class Task(NamedTuple):
    """All that a choice of buckets depends on, but for the demand.

    Args:
        region: of legal needs.
        limits: the budget.
        rho: the guard's multiple, or None.
        order: by which the engine picks.
        cost: of points.
    """

    region: Region
    limits: Budget
    rho: float | None
    order: PickOrder
    cost: CostOf


class _Found(NamedTuple):
    buckets: Points
    guards: int
    wastes: Floats


def planned(task: Task, problem: Problem, before: Fit | None = None) -> Fit:
    """Buckets for one demand, fitted anew or from those for one near it."""
    if task.rho is None:
        found = fitted(problem, task.limits, before)
    else:
        found = guarded(problem, task.region, task.limits, task.rho, before)
    if task.order is by_cost:
        return found
    return found._replace(buckets=mended(problem, found.buckets, task.order), guards=0)


def robust(
    task: Task, mixed: Callable[[Floats], Problem], trial: Trial, ladders: Mapping[str, Points]
) -> tuple[Points, int]:
    """The chosen buckets ``[k, axes]``, and how many of them are there for the guard alone.

    Args:
        task: what is asked.
        mixed: the problem of a mixture of the scenarios, given the share of each.
        trial: of buckets on the scenarios.
        ladders: rivals within the budget.
    """
    rivals = [_Found(each, 0, trial.wastes(each)) for each in ladders.values()]
    reference = min(rivals, key=lambda each: each.wastes.max(), default=None)
    shares, found = _in_rounds(task, mixed, trial)
    if reference is not None and all(_is_beaten(each, rivals) for each in found):
        problem = mixed(shares)
        for buckets, guards in _enriched(task, problem, trial.used(reference.buckets)):
            found.append(_Found(buckets, guards, trial.wastes(buckets)))
        found += rivals
        found = [each for each in found if (each.wastes <= reference.wastes + _SLACK).all()]
    multiples = [_guard(task, each) for each in found]
    bearable = _MORE_THAN_ASKED * max(min(multiples), task.rho or 0.0)

    def merit(at: int) -> tuple[bool, bool, float, float]:
        wastes = found[at].wastes
        beaten = _is_beaten(found[at], rivals)
        return beaten, multiples[at] > bearable, float(wastes.max()), float(wastes[0])

    best = found[min(range(len(found)), key=merit)]
    return best.buckets, best.guards


def _is_beaten(each: _Found, rivals: Sequence[_Found]) -> bool:
    """Whether some ladder wastes less on some scenario."""
    return any((each.wastes > rival.wastes + _SLACK).any() for rival in rivals)


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


def _in_rounds(
    task: Task, mixed: Callable[[Floats], Problem], trial: Trial
) -> tuple[Floats, list[_Found]]:
    """Plans for mixtures, each begun from the last; and the shares after them."""
    shares = np.full(trial.count, 1.0 / trial.count)
    found: list[_Found] = []
    fit = None
    for _ in range(_ROUNDS):
        fit = planned(task, mixed(shares), fit)
        wastes = trial.wastes(fit.buckets)
        found.append(_Found(fit.buckets, fit.guards, wastes))
        shares = shares * np.exp(wastes / max(float(wastes.max()), 1e-12))
        shares = shares / shares.sum()
    return shares, found


def _enriched(task: Task, problem: Problem, used: Points) -> Iterator[tuple[Points, int]]:
    """A ladder with better graphs for those that nothing uses, and how many are the guard's."""
    rest = used[(used < problem.top).any(axis=1)]
    if task.order is not by_cost:
        yield mended(problem, np.concatenate([problem.top[None], rest]), task.order), 0
        return
    serving = start(problem, rest)
    spent = problem.expenses.of(serving.buckets).sum(axis=0)
    reserve = 0.0 if task.rho is None else _GUARD_SHARE
    grow(problem, serving, np.maximum(1.0 - spent - reserve, 0.0))
    yield _with_guard(task, problem, serving.buckets)
    spent = problem.expenses.of(serving.buckets).sum(axis=0)
    improve(problem, serving, np.maximum(1.0 - spent - reserve, 0.0))
    yield _with_guard(task, problem, serving.buckets)


def _with_guard(task: Task, problem: Problem, buckets: Points) -> tuple[Points, int]:
    """With what is left of a number of graphs spent on a guard, and then on what saves."""
    guards = 0
    if task.rho is not None and task.limits.graphs is not None and problem.expenses.counts_only:
        most = task.limits.graphs - len(buckets)
        added, _ = guard(task.region, task.cost, buckets, task.rho, most)
        buckets, guards = np.concatenate([buckets, added]), len(added)
    serving = start(problem, buckets[(buckets < problem.top).any(axis=1)])
    grow(problem, serving, 1.0 - problem.expenses.of(serving.buckets).sum(axis=0))
    return np.unique(serving.buckets, axis=0), guards


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
