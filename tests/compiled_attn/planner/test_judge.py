"""Evaluates buckets on a demand; limits of a budget."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_attn.planner import Budget, CostModel, Demand, by_cost, by_size, judge, plan
from graphs import Axis, BucketSpace, explicit

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
        ({"seconds": float("nan")}, "expected seconds above 0, got nan"),
        ({"seconds": float("inf")}, "expected seconds above 0, got inf"),
    ],
)
def test_a_budget_needs_limits_above_zero(limits, message):
    with pytest.raises(ValueError, match=message):
        Budget(**limits)


def test_a_limit_in_seconds_needs_those_of_a_bucket():
    with pytest.raises(ValueError, match="expected a function seconds=bucket -> seconds with a"):
        plan(Demand(("a",), [[3]]), budget=Budget(seconds=9.0))
    with pytest.raises(ValueError, match="expected a function bytes=bucket -> bytes with a budget"):
        plan(Demand(("a",), [[3]]), budget=Budget(bytes=9.0))


def test_an_engine_that_takes_the_first_fitting_bucket_is_judged_by_its_own_order():
    space = BucketSpace(["a", "b"], [(4, 12), (5, 2)], AREA)
    needs = Demand(("a", "b"), [(3, 1)])
    cheapest, first = judge(space, needs, AREA), judge(space, needs, AREA, by_size)
    assert [use.share for use in cheapest.uses] == [0.0, 1.0]
    assert [use.share for use in first.uses] == [1.0, 0.0]


NEEDS = st.dictionaries(
    st.tuples(st.integers(1, 12), st.integers(1, 12)), st.integers(1, 9), min_size=1, max_size=8
)


@settings(max_examples=20, deadline=None)
@given(NEEDS, st.integers(1, 6))
def test_a_plan_for_the_first_fitting_bucket_misses_nothing_and_reports_its_guard(needs, graphs):
    demand = Demand(("a", "b"), [*needs], [*needs.values()])
    report = plan(demand, AREA, graphs, order=by_size)
    found = report.judge(demand)
    assert len(report.space) <= graphs and found.missed == 0
    assert found.waste == pytest.approx(report.waste)
    assert found.worst <= report.guard * (1 + 1e-9)
    alone = judge(explicit(["a", "b"], [report.space.largest.sizes]), demand, AREA)
    assert found.waste <= alone.waste + 1e-9


@settings(max_examples=40, deadline=None)
@given(
    NEEDS,
    NEEDS,
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=5),
    st.sampled_from([by_cost, by_size]),
    st.sampled_from([None, 3.0]),
)
def test_a_plan_never_wastes_more_than_the_engines_ladder(needs, later, ladder, order, rho):
    """On its demand, or on the unseen one if that decides, under the engine's own order."""
    demand, unseen = (Demand(("a", "b"), [*each], [*each.values()]) for each in (needs, later))
    top = (12, 12)
    own = explicit(["a", "b"], sorted({*ladder, top})).with_cost(AREA)
    axes = [Axis("a", 1, 12), Axis("b", 1, 12)]
    for judged, given_unseen in ((demand, None), (unseen, unseen)):
        report = plan(
            demand, AREA, 6, axes=axes, order=order, rho=rho, ladder=own, unseen=given_unseen
        )
        theirs = judge(own, judged, AREA, order)
        assert report.judge(judged).waste <= theirs.waste + 1e-9
        assert not report.is_ladder or {*report.space} == {*own}
        assert len(report.space) <= 6 and report.space.largest.sizes == top


def test_a_ladder_beyond_the_budget_is_no_plan():
    demand, own = Demand(("a", "b"), [(n, n) for n in range(1, 9)]), range(1, 9)
    ladder = explicit(["a", "b"], [(n, n) for n in own]).with_cost(AREA)
    assert plan(demand, AREA, 8, rho=None, ladder=ladder).waste == 0
    report = plan(demand, AREA, 3, rho=None, ladder=ladder)
    assert not report.is_ladder and len(report.space) == 3
