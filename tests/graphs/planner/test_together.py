"""Several spaces under one budget."""

from __future__ import annotations

import numpy as np
import pytest

from graphs import Axis
from graphs.planner import Budget, Demand, Part, plan, plan_together

RNG = np.random.default_rng(3)
DECODE = Demand(("rows", "blocks"), RNG.integers(1, 200, (600, 2)))
PREFILL = Demand(("tokens",), RNG.integers(1, 500, (400, 1)))


def parts(**more):
    return {
        "decode": Part(DECODE, lambda n: n["rows"] + n["blocks"], **more),
        "prefill": Part(PREFILL, lambda n: n["tokens"] * 2, **more),
    }


@pytest.mark.parametrize("graphs", [2, 3, 10, 40])
def test_a_number_of_graphs_is_shared(graphs):
    reports = plan_together(parts(), graphs)
    assert list(reports) == ["decode", "prefill"]
    assert sum(len(report.space) for report in reports.values()) <= graphs
    assert reports["decode"].space.names == ("rows", "blocks")
    assert reports["prefill"].space.largest.tokens == PREFILL.largest["tokens"]


def test_seconds_and_bytes_are_shared():
    def seconds(bucket):
        return 0.5 + sum(bucket.values()) / 1000

    budget = Budget(graphs=30, seconds=12.0, bytes=5_000.0)
    reports = plan_together(parts(seconds=seconds, bytes=lambda b: sum(b.values())), budget)
    buckets = [bucket for report in reports.values() for bucket in report.space]
    assert len(buckets) <= 30
    assert sum(map(seconds, buckets)) <= 12.0 * (1 + 1e-6)
    assert sum(sum(bucket.values()) for bucket in buckets) <= 5_000 * (1 + 1e-6)
    assert sum(report.seconds for report in reports.values()) <= 12.0 * (1 + 1e-6)


def test_the_budget_goes_where_it_saves_most():
    busy = plan_together(parts(), 20, rho=None)
    quiet = {**parts(), "decode": Part(DECODE[:10], lambda n: n["rows"] + n["blocks"])}
    idle = plan_together(quiet, 20, rho=None)
    assert len(busy["decode"].space) > len(idle["decode"].space)
    assert len(busy["prefill"].space) < len(idle["prefill"].space)


def test_sharing_wastes_no_more_than_halves():
    def total(reports):
        demands = {"decode": DECODE, "prefill": PREFILL}
        own = {
            name: float(reports[name].cost.of(d.names, d.points) @ d.weights)
            for name, d in demands.items()
        }
        return sum(reports[name].waste * own[name] for name in demands)

    halves = {name: plan(p.demand, p.cost, 10, rho=None) for name, p in parts().items()}
    assert total(plan_together(parts(), 20, rho=None)) <= total(halves) * 1.001


def test_a_space_that_takes_nothing_of_a_limit_is_planned_all_the_same():
    both = parts()
    both["decode"] = Part(DECODE, lambda n: n["rows"] + n["blocks"], bytes=lambda b: 0.0)
    both["prefill"] = Part(PREFILL, lambda n: n["tokens"], bytes=lambda b: 100.0)
    reports = plan_together(both, Budget(graphs=12, bytes=300.0))
    assert len(reports["prefill"].space) <= 3 and reports["decode"].bytes == 0
    assert sum(len(report.space) for report in reports.values()) <= 12


def test_the_same_parts_give_the_same_plans():
    first, second = (plan_together(parts(), 12) for _ in range(2))
    assert {n: r.to_dict() for n, r in first.items()} == {n: r.to_dict() for n, r in second.items()}


def test_no_part_and_too_few_graphs_are_refused():
    with pytest.raises(ValueError, match="expected at least one part, got none: name the spaces"):
        plan_together({}, 8)
    with pytest.raises(ValueError, match="expected a budget with room for the maximum of each"):
        plan_together(parts(), 1)


def test_the_guard_of_each_part_is_its_own():
    both = parts()
    both["prefill"] = Part(PREFILL, lambda n: n["tokens"], axes=[Axis("tokens", 1, 500)])
    report = plan_together(both, 60, rho=3.0)["prefill"]
    found = max(report.space.pick(tokens=n).tokens / n for n in range(1, 501))
    assert found == pytest.approx(report.guard)
