"""Several axes: near the best, never above the budget, the maximum always there."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_attn.planner import Budget, CostModel, Demand, judge, plan
from compiled_attn.planner.cells import Problem, compress, jitter
from compiled_attn.planner.region import Region
from graphs import Axis, BucketOverflow, exponential
from graphs.buckets.graph_memory import GraphMemory
from tests.compiled_attn.planner.brute import figures, least_waste

NAMES = ("a", "b")
points = st.tuples(st.integers(1, 12), st.integers(0, 12))
demands = st.dictionaries(points, st.integers(1, 9), min_size=1, max_size=6)


def cost(need):
    return 3 + need["a"] * (2 + need["b"])


def demand_of(needs):
    return Demand(NAMES, [*needs], [*needs.values()])


def largest(needs):
    return tuple(max(column) for column in zip(*needs, strict=True))


@given(demands, st.integers(1, 3))
def test_no_plan_is_better_than_the_best(needs, graphs):
    demand = demand_of(needs)
    report = plan(demand, cost, graphs, rho=None)
    best = least_waste(demand, largest(needs), cost, lambda chosen: True, graphs)
    assert best <= report.waste + 1e-9


@settings(max_examples=40)
@given(
    demands,
    st.integers(1, 9),
    st.floats(1.0, 6.0),
    st.sampled_from([None, 2.0, 3.0]),
    st.sampled_from([0.0, 300.0]),
    st.floats(1.0, 6.0),
)
def test_no_limit_of_several_is_exceeded(needs, graphs, times, rho, shared, more):
    top = largest(needs)

    def seconds(bucket):
        return 100.0 + bucket["a"] * bucket["b"]

    limit = times * seconds({"a": top[0], "b": top[1]})
    memory = GraphMemory(50.0, 2.0, shared, 10.0, 0.0, lambda bucket: bucket["a"])
    memory = replace(memory, largest=max(top[0], 1))  # the pool of the maximum
    room = more * memory.total([{"a": top[0], "b": top[1]}])
    budget = Budget(graphs=graphs, seconds=limit, bytes=room)
    axes = [Axis("a", 0, top[0]), Axis("b", 0, top[1])]
    report = plan(demand_of(needs), cost, budget, axes=axes, seconds=seconds, bytes=memory, rho=rho)
    assert len(report.space) <= graphs
    assert report.bytes == pytest.approx(memory.total(report.space))
    assert report.bytes <= room * (1 + 1e-9)
    spent = sum(seconds(bucket) for bucket in report.space)
    assert spent <= limit * (1 + 1e-9) and report.seconds == pytest.approx(spent)
    assert report.space.pick(a=top[0], b=top[1]).sizes == top


@given(demands, st.integers(1, 6), st.integers(12, 20), st.integers(12, 20))
def test_the_maximum_is_always_a_bucket(needs, graphs, high_a, high_b):
    axes = [Axis("a", 1, high_a), Axis("b", 0, high_b)]
    report = plan(demand_of(needs), cost, graphs, axes=axes)
    assert report.space.largest.sizes == (high_a, high_b)
    assert all(report.space.pick(a=a, b=b) for a, b in needs)
    with pytest.raises(BucketOverflow):
        report.space.pick(a=high_a + 1, b=0)


def a_demand(steps=200, seed=1):
    rng = np.random.default_rng(seed)
    rows = rng.integers(1, 64, steps)
    return Demand(NAMES, np.stack([rows, rows * rng.integers(1, 20, steps)], axis=1))


@cache
def planned(graphs):
    return plan(a_demand(), cost, graphs)


def test_the_same_arguments_give_the_same_plan():
    first, second = planned(16), plan(a_demand(), cost, 16)
    assert figures(first) == figures(second)
    assert str(first) == str(second)


def test_the_order_of_the_needs_does_not_matter():
    turned = Demand(NAMES, a_demand().points[::-1])
    assert figures(planned(16)) == figures(plan(turned, cost, 16))


def test_a_count_weighs_as_much_as_that_many_equal_needs():
    once = Demand(NAMES, [(3, 4), (9, 2)], [5, 2])
    often = Demand(NAMES, [(3, 4)] * 5 + [(9, 2)] * 2)
    assert figures(plan(once, cost, 2)) == figures(plan(often, cost, 2))


def test_more_graphs_waste_less():
    wastes = [planned(graphs).waste for graphs in (4, 16, 64)]
    assert wastes[0] > wastes[1] > wastes[2] > 0


def test_a_plan_beats_the_product_of_two_ladders_where_the_axes_go_together():
    ladder = exponential(a=(1, 64, 5), b=(1, 1300, 5))
    demand = a_demand()
    theirs = judge(ladder.with_cost(CostModel(cost)), demand, CostModel(cost))
    assert planned(len(ladder)).waste < theirs.waste / 3


def test_a_report_counts_each_step_once_and_its_wastes_add_up():
    report = planned(16)
    assert sum(use.share for use in report.uses) == pytest.approx(1)
    assert sum(use.waste for use in report.uses) == pytest.approx(report.waste)
    assert [use.bucket for use in report.uses] == list(report.space)
    assert report.judge(a_demand()).waste == pytest.approx(report.waste)
    assert report.seconds is None
    assert str(report).startswith(f"{len(report.space)} buckets, waste ")


def test_a_measured_cost_plans_nearly_as_well_as_the_formula_that_it_measured():
    sizes = [(a, b) for a in (1, 8, 32, 64) for b in (1, 80, 320, 1200)]
    measured = CostModel.fitted(({"a": a, "b": b}, cost({"a": a, "b": b})) for a, b in sizes)
    by_measure = plan(a_demand(), measured, 25)
    theirs = judge(by_measure.space.with_cost(cost), a_demand(), CostModel(cost))
    assert theirs.missed == 0
    assert theirs.waste < 1.25 * planned(25).waste


@settings(max_examples=40)
@given(demands, st.integers(1, 6))
def test_cells_hold_all_needs_and_their_weight(needs, count):
    demand = demand_of(needs)

    def sums(points):
        return points.sum(axis=1) * 1.0

    corners, weights, _ = compress(demand.points, demand.weights, sums, count)
    assert len(corners) <= count
    assert weights.sum() == pytest.approx(demand.total)
    for point in demand.points:
        assert (corners >= point).all(axis=1).any()


def test_perturbed_copies_stay_within_limits_and_keep_the_weight():
    high = np.array([120, 100])
    needs = np.array([(i, 0 if i % 3 else i - 1) for i in range(1, 121)])
    moved, weights = jitter(needs, np.ones(120), high, share=0.25, spread=0.3, seed=0)
    assert weights.sum() == pytest.approx(120) and weights[:120].sum() == pytest.approx(90)
    assert (moved[:120] == needs).all() and (moved[120:] <= high).all()
    copies, originals = moved[120:], np.tile(needs, (4, 1))
    at_limit, often = originals[:, 0] == 120, originals[:, 1] == 0
    assert (copies[at_limit, 0] == 120).all(), "a size at its limit stays"
    assert (copies[often, 1] == 0).all(), "a frequent size stays"
    assert (copies[~at_limit, 0] != originals[~at_limit, 0]).mean() > 0.8
    assert copies[:, 0].max() > 100 and (copies[:, 0] > originals[:, 0]).any()


def test_an_illegal_perturbed_copy_falls_back_to_its_original():
    needs = np.array([(i, i) for i in range(1, 101)])

    def allows(rows):
        return rows[:, 1] <= rows[:, 0]

    high = np.array([200, 200])
    limits = {"share": 0.25, "spread": 0.3, "seed": 0}
    free, weights = jitter(needs, np.ones(100), high, **limits)
    legal, same = jitter(needs, np.ones(100), high, **limits, allows=allows)
    assert not allows(free).all() and allows(legal).all() and (weights == same).all()
    assert (legal[~allows(free)] == np.tile(needs, (5, 1))[~allows(free)]).all()
    assert (legal[allows(free)] == free[allows(free)]).all()


def test_a_plan_chooses_among_legal_needs_only():
    needs = Demand(NAMES, [(i, i) for i in range(1, 60)])
    axes = [Axis("a", 1, 90), Axis("b", 1, 90)]
    region = Region.of(needs, axes, lambda need: need["b"] <= need["a"])
    cost_of = partial(CostModel(cost).of, NAMES)
    corners = Problem.of(needs, region, cost_of, seed=0).corners
    assert len(corners) > 60 and (corners[:, 1] <= corners[:, 0]).all()


def test_a_budget_too_small_for_the_maximum_says_so():
    with pytest.raises(ValueError, match=r"room for the maximum, got Budget.*raise it"):
        plan(a_demand(), cost, Budget(seconds=1.0), seconds=lambda bucket: 2.0)


@pytest.mark.parametrize("rho", [1.0, 0.5, float("inf"), float("nan")])
def test_a_guard_of_one_or_less_is_refused(rho):
    with pytest.raises(ValueError, match="expected rho above 1, or None for no guard, got"):
        plan(a_demand(), cost, 8, rho=rho)


def test_a_need_outside_the_axes_is_named():
    with pytest.raises(ValueError, match=r"needs with a <= 5, b <= 20, got .*raise the axis"):
        plan(Demand(NAMES, [(6, 1)]), cost, 8, axes=[Axis("a", 0, 5), Axis("b", 0, 20)])


def test_an_axis_that_the_demand_lacks_is_named():
    with pytest.raises(ValueError, match=r"expected axes of the demand \(a, b\), got c: leave"):
        plan(Demand(NAMES, [(6, 1)]), cost, 8, axes=[Axis("c", 0, 5)])


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda n: n["a"] * 0, "expected needs that cost something, got a cost of 0"),
        (lambda n: 100 - n["a"], "expected a cost that never falls where a size grows, got"),
        (lambda n: n["a"] * (50 - n["b"] % 50), "expected a cost that never falls"),
        (lambda n: n["a"] - 40.0, "expected finite costs from 0 on, got -"),
        (lambda n: n["a"] / 0.0 if np.ndim(n["a"]) else float("nan"), "expected finite costs"),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_cost_that_cannot_be_is_refused(bad, message):
    with pytest.raises(ValueError, match=message):
        plan(a_demand(300), bad, 8)
