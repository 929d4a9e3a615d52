"""One axis: the plan is the best there is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiled_attn.planner import Demand, plan
from graphs import Axis
from tests.compiled_attn.planner.brute import least_waste, paid

demands = st.dictionaries(st.integers(1, 40), st.integers(1, 9), min_size=1, max_size=8)
costs = st.sampled_from([lambda n: n["n"], lambda n: 7 + n["n"], lambda n: n["n"] ** 2 + 1])


@given(demands, costs, st.integers(1, 5))
def test_the_plan_wastes_as_little_as_the_best_of_all_sets(needs, cost, graphs):
    demand = Demand(("n",), [[n] for n in needs], list(needs.values()))
    report = plan(demand, cost, graphs, rho=None)
    best = least_waste(demand, (max(needs),), cost, lambda chosen: True, graphs)
    assert report.waste == pytest.approx(best, abs=1e-9)
    assert len(report.space) <= graphs


@given(demands, st.integers(41, 60), st.integers(1, 4))
def test_a_maximum_above_all_needs_takes_one_of_the_buckets(needs, high, graphs):
    demand = Demand(("n",), [[n] for n in needs], list(needs.values()))
    report = plan(demand, None, graphs, axes=[Axis("n", 1, high)], rho=None)
    best = least_waste(demand, (high,), lambda n: n["n"], lambda chosen: True, graphs)
    assert report.waste == pytest.approx(best, abs=1e-9)
    assert report.space.largest.n == high


def test_enough_graphs_for_all_sizes_waste_nothing():
    demand = Demand(("n",), [[5], [9], [17], [9]])
    report = plan(demand, budget=3)
    assert [bucket.n for bucket in report.space] == [5, 9, 17]
    assert report.waste == 0


def test_a_guard_holds_next_to_the_demand():
    demand = Demand(("n",), [[100]] * 50 + [[90]] * 50)
    report = plan(demand, budget=12, axes=[Axis("n", 1, 100)], rho=4.0)
    assert report.guard <= report.rho
    assert max(report.space.pick(n=n).n / n for n in range(1, 101)) <= 4.0
    assert report.waste == 0
    assert paid(demand, [bucket.sizes for bucket in report.space], lambda n: n["n"]) == 9500
