"""Judging a space, the budget's limits, and the watch on a running plan."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from compiled_attn.planner import Budget, CostModel, Demand, DriftWatch, judge, plan
from graphs import explicit

SPACE = explicit(["a", "b"], [(4, 4), (8, 2), (16, 16)])
AREA = CostModel(lambda n: n["a"] * n["b"])


def test_each_need_pays_for_the_cheapest_bucket_that_holds_it():
    demand = Demand(("a", "b"), [(4, 4), (2, 2), (5, 2), (5, 3)], [1, 1, 1, 1])
    found = judge(SPACE, demand, AREA)
    own, paid = 16 + 4 + 10 + 15, 16 + 16 + 16 + 256
    assert found.waste == pytest.approx(paid / own - 1)
    assert found.worst == pytest.approx(256 / 15) and found.missed == 0
    assert [use.share for use in found.uses] == [0.5, 0.25, 0.25] and found.unused == 0


def test_needs_that_no_bucket_holds_are_missed_and_cost_nothing():
    found = judge(SPACE, Demand(("b", "a"), [(4, 4), (17, 1)], [3, 1]), AREA)
    assert found.missed == 0.25 and found.waste == 0 and found.unused == 2
    nothing = judge(SPACE, Demand(("a", "b"), [(17, 17)]), AREA)
    assert nothing.missed == 1 and nothing.waste == 0 and nothing.worst == 1


def test_a_demand_over_other_axes_or_of_no_cost_is_refused():
    with pytest.raises(ValueError, match="expected a demand over a, b, got one over a, c: project"):
        judge(SPACE, Demand(("a", "c"), [(1, 1)]), AREA)
    with pytest.raises(ValueError, match="expected needs that cost something, got a cost of 0"):
        judge(SPACE, Demand(("a", "b"), [(0, 0)]), AREA)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({}, "expected a limit, got none: set graphs, seconds or bytes"),
        ({"graphs": 0}, "expected graphs above 0, got 0: raise it, or leave it out"),
        ({"graphs": 2.5}, "expected graphs above 0, got 2.5"),
        ({"seconds": -1.0}, "expected seconds above 0, got -1.0"),
        ({"bytes": float("nan")}, "expected bytes above 0, got nan"),
        ({"bytes": float("inf")}, "expected bytes above 0, got inf"),
    ],
)
def test_a_budget_needs_limits_above_zero(limits, message):
    with pytest.raises(ValueError, match=message):
        Budget(**limits)


@pytest.mark.parametrize("name", ["seconds", "bytes"])
def test_a_limit_needs_a_function_that_says_what_a_bucket_takes(name):
    with pytest.raises(ValueError, match=f"expected a function {name}=bucket -> {name} beside a"):
        plan(Demand(("a",), [[3]]), budget=Budget(**{name: 9.0}))


def promising(waste):
    report = plan(Demand(("a", "b"), [(1, 1)]), AREA, 1)
    return replace(report, waste=waste)


def test_a_watch_flags_once_when_the_waste_is_twice_the_promised():
    watch = DriftWatch(promising(0.1), after=10, window=1000)
    small, bucket = {"a": 1, "b": 1}, {"a": 2, "b": 1}
    assert not any(watch.record(small, small) for _ in range(8))
    assert [watch.record(small, bucket) for _ in range(4)] == [False, True, False, False]
    assert watch.has_drifted and watch.steps == 12 and watch.waste > 0.2
    assert str(watch).startswith("drifted: waste ") and "10.0% was promised" in str(watch)


def test_a_plan_that_keeps_its_promise_is_never_flagged():
    demand = Demand(("a", "b"), [(i, j) for i in range(1, 30) for j in range(1, 30)])
    report = plan(demand, AREA, 12)
    watch = DriftWatch(report, after=100)
    for a, b in np.random.default_rng(0).permutation(demand.points).tolist():
        assert not watch.record({"a": a, "b": b}, report.space.pick(a=a, b=b))
    assert watch.waste == pytest.approx(report.waste, rel=0.1) and not watch.has_drifted


def test_old_steps_fade():
    watch = DriftWatch(promising(0.0), after=1, window=5)
    need = {"a": 1, "b": 1}
    watch.record(need, {"a": 9, "b": 1})
    for _ in range(100):
        watch.record(need, need)
    assert watch.waste < 1e-6 and watch.has_drifted


@pytest.mark.parametrize("options", [{"after": 0}, {"window": 0}])
def test_a_watch_that_cannot_work_is_refused(options):
    with pytest.raises(ValueError, match="expected after >= 1 and window >= 1, got"):
        DriftWatch(promising(0.1), **options)
