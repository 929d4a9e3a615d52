"""Kinds of steps, usual ladders, and the comparison of strategies."""

from __future__ import annotations

import numpy as np
import pytest

from compiled_attn.planner import Demand, judge
from compiled_attn.planner.simulator import SimulatedEngine, simulate
from compiled_attn.planner.simulator.kinds import KINDS, step_kind, within
from compiled_attn.planner.simulator.ladders import SplitPlan, ladders_within
from compiled_attn.workloads import Arrival, synthetic
from graphs import explicit

CONTEXT = 2048


ENGINE = SimulatedEngine(512, 16, 32, 512)


def simulated(name: str, kind: str = "chat") -> Demand:
    arrivals = [
        Arrival(a.arrival_s, 1 + a.prompt_tokens // 16, 1 + a.output_tokens // 8, a.prefix_ids, 32)
        for a in synthetic(kind, 60)
    ]
    kind = step_kind(name, ENGINE, CONTEXT)
    needs = simulate(arrivals, ENGINE, speed=None, steps=kind.steps).needs
    return within(needs[name], kind.axes)[0]


@pytest.mark.parametrize("name", KINDS)
def test_every_simulated_need_is_legal_and_within_the_axes(name):
    steps = step_kind(name, ENGINE, CONTEXT)
    needs = simulated(name)
    columns = dict(zip(needs.names, needs.points.T, strict=True))
    assert needs.names == steps.names
    assert np.asarray(steps.legal(columns)).all()
    assert (steps.cost.of(needs.names, needs.points) > 0).all()


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("most", [1, 20])
def test_ladders_are_within_their_size_and_miss_no_need(name, most):
    steps = step_kind(name, ENGINE, CONTEXT)
    for label, space in ladders_within(steps, most).items():
        assert len(space) <= most and len(space) >= most * 0.6 and space.names == steps.names, label
        assert judge(space, simulated(name), steps.cost).missed == 0


def test_axes_end_where_the_requests_cannot_read_more():
    engine = SimulatedEngine(max_tokens=64, max_seqs=2, block_size=32, blocks=4096)
    high = {axis.name: axis.high for axis in step_kind("engine", engine, 1024).axes}
    assert high["unique"] == high["shared"] == 2 * 32


def test_a_comparison_judges_the_plan_last_and_all_on_the_second_needs():
    steps = step_kind("engine", ENGINE, CONTEXT)
    needs = simulated("engine")
    found = SplitPlan(steps, needs, ladders_within(steps, 3)["exponential"], 24, 3.0)
    judged = found.judged(24)
    assert list(judged)[-2:] == ["engine's default", "fitted plan"]
    plan = judged["fitted plan"]
    assert plan.waste == found.early.judge(needs.halves()[1]).waste
    assert plan.waste < judged["exponential"].waste
    assert all(each.missed == 0 for each in judged.values())


def test_a_plan_that_is_worse_than_the_ladder_on_the_second_half_is_the_ladder():
    steps = step_kind("table", ENGINE, CONTEXT)
    calm, busy = [(8, 8)] * 50, [(200, 16)] * 50
    ladder = explicit(steps.names, [(200, 16), (512, 16)])
    found = SplitPlan(steps, Demand(steps.names, calm + busy), ladder, 2, None)
    judged = found.judged(2)
    assert found.early.is_ladder and judged["fitted plan"] == judged["engine's default"]
    assert found.whole().space == found.early.space
    assert found.whole().waste == pytest.approx(50 * (216 - 16) / (50 * 16 + 50 * 216))


def test_a_step_that_must_be_cut_is_missed_by_every_strategy():
    steps = step_kind("table", ENGINE, CONTEXT)
    needs = Demand(("tokens", "requests"), [(9, 2), (8, 1), (512, 16), (513, 16)])
    found = SplitPlan(steps, needs, ladders_within(steps, 4)["exponential"], 4, 3.0)
    assert {name: judged.missed for name, judged in found.judged(4).items()} == dict.fromkeys(
        ("exponential", "padding-aware", "engine's default", "fitted plan"), 1 / 3
    )


def test_the_largest_usual_step_is_added_at_a_small_share_of_the_cost():
    steps = step_kind("engine", SimulatedEngine(64, 4, 32, 256), 1024)
    needs = Demand(steps.names, [(n, n % 3, n, 1) for n in range(2, 40)])
    extended = steps.with_largest_usual(needs)
    added = extended[len(needs) :]
    assert extended[: len(needs)] == needs and added.points.tolist() == [[64, 32, 128, 4]]
    whole, more = (float(steps.cost.of(d.names, d.points) @ d.weights) for d in (needs, added))
    assert more == pytest.approx(0.005 * whole)
    table = step_kind("table", ENGINE, CONTEXT)
    assert table.with_largest_usual(simulated("table")) == simulated("table")


def test_needs_that_no_step_may_have_are_counted():
    steps = step_kind("table", ENGINE, CONTEXT)
    inside, cut = within(Demand(("requests", "tokens"), [(1, 5), (17, 5)], [3, 1]), steps.axes)
    assert (
        inside.names == ("tokens", "requests")
        and inside.points.tolist() == [[5, 1]]
        and cut == 0.25
    )
    with pytest.raises(ValueError, match="expected needs with tokens <= 512, requests <= 16, got"):
        within(Demand(("requests", "tokens"), [(17, 5)]), steps.axes)


def test_unknown_kinds_and_contexts_are_refused():
    with pytest.raises(ValueError, match="unknown kind of steps 'x'; expected one of engine"):
        step_kind("x", SimulatedEngine(), CONTEXT)
    with pytest.raises(ValueError, match="expected a context of at least 2 tokens, got 1: raise"):
        step_kind("engine", SimulatedEngine(), 1)
