"""The guard: no legal need pays more than promised, each one tried."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_attn.planner import Demand, plan
from compiled_attn.planner.region import Region
from graphs import Axis
from tests.compiled_attn.planner.brute import every_need, figures

LEGAL = {
    "all": None,
    "above": lambda n: n["b"] >= n["a"],
    "band": lambda n: (n["b"] >= n["a"]) & (n["b"] <= 3 * n["a"]),
    "line": lambda n: n["b"] == n["a"],
}


def cost(need):
    return need["a"] * (2 + need["b"])


def worst(report, axes, legal):
    needs = every_need(axes, legal or (lambda need: True))
    return max(cost(report.space.pick(**n)) / cost(n) for n in needs if cost(n))


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=5),
    st.sampled_from(sorted(LEGAL)),
    st.sampled_from([1.5, 3.0]),
    st.sampled_from([4, 16, 48]),
)
def test_no_legal_need_pays_more_than_the_report_says(needs, which, rho, graphs):
    axes = [Axis("a", 1, 30), Axis("b", 1, 30)]
    report = plan(Demand(("a", "b"), needs), cost, graphs, axes=axes, legal=LEGAL[which], rho=rho)
    found = worst(report, axes, LEGAL[which])
    assert found <= report.guard * (1 + 1e-9)
    assert report.guard > rho or found <= rho * (1 + 1e-9)
    assert len(report.space) <= graphs


@pytest.mark.parametrize("which", sorted(LEGAL))
def test_with_enough_graphs_the_guard_reaches_rho(which):
    axes = [Axis("a", 1, 60), Axis("b", 0, 90)]
    demand = Demand(("a", "b"), [(40, 40), (60, 90)])
    report = plan(demand, cost, 64, axes=axes, legal=LEGAL[which], rho=3.0)
    assert report.guard <= report.rho
    assert worst(report, axes, LEGAL[which]) <= 3.0 * (1 + 1e-9)


def test_three_axes_hold_it_too():
    axes = [Axis("a", 1, 12), Axis("b", 0, 12), Axis("c", 0, 8)]

    def three(need):
        return need["a"] * (4 + need["b"] + 2 * need["c"])

    def legal(need):
        return need["b"] + need["c"] <= 14

    report = plan(Demand(("a", "b", "c"), [(3, 4, 5)]), three, 48, axes=axes, legal=legal)
    found = max(three(report.space.pick(**n)) / three(n) for n in every_need(axes, legal))
    assert found <= report.guard * (1 + 1e-9) <= 3.0 * (1 + 2e-9)


def test_with_too_few_graphs_the_report_says_what_the_guard_reaches():
    axes = [Axis("a", 1, 60), Axis("b", 1, 60)]
    report = plan(Demand(("a", "b"), [(60, 60)]), cost, 6, axes=axes, rho=2.0)
    assert report.guard > 2.0 >= report.rho
    assert worst(report, axes, None) <= report.guard * (1 + 1e-9)
    free = plan(Demand(("a", "b"), [(60, 60)]), cost, 6, axes=axes, rho=None)
    assert report.guard < free.guard, "the guard makes the worst better as far as it can"


def test_without_a_guard_all_graphs_go_to_the_demand():
    axes = [Axis("a", 1, 60), Axis("b", 1, 60)]
    report = plan(Demand(("a", "b"), [(60, 60)]), cost, 6, axes=axes, rho=None)
    assert len(report.space) == 1


def test_a_legality_that_takes_no_arrays_is_called_per_need():
    axes = [Axis("a", 1, 20), Axis("b", 1, 20)]
    demand = Demand(("a", "b"), [(5, 6)])
    slow = plan(demand, cost, 24, axes=axes, legal=lambda n: max(n["a"], n["b"]) == n["b"])
    fast = plan(demand, cost, 24, axes=axes, legal=LEGAL["above"])
    assert figures(slow) == figures(fast)


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(1, 25), st.integers(1, 25)), min_size=0, max_size=6),
    st.sampled_from(sorted(LEGAL)),
)
def test_the_worst_of_a_small_region_is_exact(buckets, which):
    axes = [Axis("a", 1, 25), Axis("b", 1, 25)]
    region = Region(axes, LEGAL[which])
    points = np.array([*buckets, (25, 25)])
    costs = cost({"a": points[:, 0], "b": points[:, 1]}) * 1.0

    def price(need):
        held = (points >= need.sizes).all(axis=1)
        return costs[held].min()

    exact = max(price(n) / cost(n) for n in every_need(axes, LEGAL[which] or (lambda n: True)))
    reported = region.worst(points, lambda p: p[:, 0] * (2.0 + p[:, 1]))
    assert reported == pytest.approx(exact)
