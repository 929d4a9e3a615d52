"""Plans for drift: on no demand near the recorded one worse than the best ladder of their size."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_attn.planner import Budget, CostModel, Demand, by_size, judge, plan
from compiled_attn.planner.problem import Expenses, region_of
from compiled_attn.planner.robust import fitting_ladders
from compiled_attn.planner.scenarios import rare_kinds, scenarios_of
from graphs import Axis, BucketSpace, exponential, linear

NAMES = ("a", "b")
TOP = 12
AXES = [Axis("a", 1, TOP), Axis("b", 0, TOP)]
points = st.tuples(st.integers(1, TOP), st.integers(0, TOP))
demands = st.dictionaries(points, st.integers(1, 9), min_size=1, max_size=8)
LADDERS = {
    "linear": linear(a=(4, 4, TOP), b=(4, 4, TOP)),
    "exponential": exponential(a=(3, TOP, 3), b=(0, TOP, 3)),
}


def cost(need):
    return 3 + need["a"] * (2 + need["b"])


def demand_of(needs):
    return Demand(NAMES, [*needs], [*needs.values()])


def near(demand):
    """The demands that a plan is made for."""
    region = region_of(demand, AXES, None)
    found = scenarios_of(demand, region, lambda p: CostModel(cost).of(NAMES, p), seed=0)
    return dict(found.each(NAMES))


def wastes(space, demands, order=None):
    orders = () if order is None else (order,)
    model = CostModel(cost)
    return {n: judge(space.with_cost(cost), d, model, *orders).waste for n, d in demands.items()}


@settings(max_examples=5, deadline=None)
@given(demands, st.sampled_from([None, 3.0]), st.sampled_from([None, by_size]))
def test_a_plan_is_on_no_demand_considered_worse_than_the_ladder_that_is_best_at_its_worst(
    needs, rho, order
):
    demand = demand_of(needs)
    orders = {} if order is None else {"order": order}
    report = plan(demand, cost, 16, axes=AXES, rho=rho, drift=True, ladders=LADDERS, **orders)
    assert len(report.space) <= 16
    considered = near(demand)
    theirs = {name: wastes(space, considered, order) for name, space in LADDERS.items()}
    best = min(theirs, key=lambda name: max(theirs[name].values()))
    ours = wastes(report.space, considered, order)
    assert max(theirs[report.drift.reference].values()) == pytest.approx(max(theirs[best].values()))
    for name, waste in ours.items():
        assert waste <= theirs[report.drift.reference][name] + 1e-7, name
    assert {o.scenario: o.waste for o in report.drift.outcomes} == pytest.approx(ours)


@settings(max_examples=10, deadline=None)
@given(st.dictionaries(st.integers(1, 40), st.integers(1, 9), min_size=2, max_size=12))
def test_on_one_axis_too(needs):
    demand = Demand(("n",), [(n,) for n in needs], [*needs.values()])
    ladders = {"linear": linear(n=(8, 8, 40)), "exponential": exponential(n=(1, 40, 6))}
    report = plan(
        demand, lambda need: need["n"], 6, axes=[Axis("n", 1, 40)], drift=True, ladders=ladders
    )
    region = region_of(demand, [Axis("n", 1, 40)], None)
    model = CostModel(lambda need: need["n"])
    found = scenarios_of(demand, region, lambda p: model.of(("n",), p), 0)
    considered = dict(found.each(("n",)))
    reference = ladders[report.drift.reference].with_cost(model)
    for outcome in report.drift.outcomes:
        theirs = judge(reference, considered[outcome.scenario], model).waste
        assert outcome.waste <= theirs + 1e-7


@given(demands)
def test_the_first_demand_considered_is_the_recorded_one_and_each_weighs_as_much(needs):
    demand = demand_of(needs)
    found = near(demand)
    first = found["as recorded"].histogram()
    assert (first.points == demand.histogram().points).all()
    shares = first.weights / first.total
    assert shares == pytest.approx(demand.histogram().weights / demand.total)
    for each in found.values():
        own = CostModel(cost).of(NAMES, each.points) @ each.weights
        assert own == pytest.approx(1.0)


def test_a_ladder_above_the_budget_is_no_rival_and_the_maximum_joins_each():
    region = region_of(Demand(NAMES, [(1, 1)]), AXES, None)
    sizes = {"small": np.array([[2, 2]]), "large": np.array([[i, 1] for i in range(1, 12)])}
    found = fitting_ladders(sizes, region, Expenses(NAMES, Budget(graphs=3)))
    assert [*found] == ["small"] and found["small"].tolist() == [[2, 2], [TOP, TOP]]


def test_a_rare_kind_is_the_rarer_side_of_an_axis_with_zeros():
    demand = Demand(NAMES, [(1, 0), (2, 0), (3, 4), (0, 5)], [5, 2, 2, 1])
    assert [(kind.name, kind.share) for kind in rare_kinds(demand)] == [
        ("a = 0", pytest.approx(0.1)),
        ("b > 0", pytest.approx(0.3)),
    ]


def test_the_share_of_a_rare_kind_that_is_borne_is_where_a_ladder_draws_level():
    demand = Demand(NAMES, [(4, 0)] * 97 + [(4, 9)] * 3)
    ladders = {"for many": BucketSpace(NAMES, [(4, 9), (TOP, TOP)])}
    report = plan(demand, cost, 2, axes=AXES, rho=None, drift=True, ladders=ladders)
    (limit,) = report.drift.limits
    assert limit.kind == "b > 0" and limit.share == pytest.approx(0.03)

    def paid(space, share):
        mixed = Demand(NAMES, [(4, 0), (4, 9)], [1 - share, share])
        return judge(space.with_cost(cost), mixed, CostModel(cost)).waste

    level = limit.limit
    if level < 1:
        assert paid(report.space, level) == pytest.approx(paid(ladders["for many"], level))
        assert paid(report.space, level + 0.02) > paid(ladders["for many"], level + 0.02)
    assert paid(report.space, level - 0.01) <= paid(ladders["for many"], level - 0.01) + 1e-9


def shared_prefix_steps(seed, rare, steps=1500):
    """Decodes of many, and a few steps with the chunk of a prompt that reads shared blocks."""
    rng = np.random.default_rng(seed)
    is_rare = rng.random(steps) < rare
    sequences = rng.integers(8, 128, steps)
    unique = sequences * rng.integers(4, 40, steps)
    tokens = np.where(is_rare, rng.integers(100, 2048, steps), sequences)
    shared = np.where(is_rare, np.exp(rng.uniform(0, np.log(500), steps)).astype(int) + 1, 0)
    return Demand(("tokens", "shared", "unique"), np.stack([tokens, shared, unique], axis=1))


@pytest.mark.slow
def test_shared_prefix_steps_that_rise_from_3_to_12_percent_cost_no_more_than_in_a_ladder():
    axes = [Axis("tokens", 1, 2048), Axis("shared", 0, 512), Axis("unique", 0, 5120)]
    model = CostModel(lambda n: n["tokens"] * (15 + (n["tokens"] + 128 * n["shared"]) / 1000)
                      + 5.6 * n["unique"])  # fmt: skip
    ladder = exponential(tokens=(1, 2048, 4, 128), shared=(0, 512, 4, 8), unique=(0, 5120, 4, 128))
    first, second = shared_prefix_steps(0, 0.028), shared_prefix_steps(1, 0.12)
    report = plan(first, model, 64, axes=axes, drift=True, ladders={"unified": ladder})
    theirs = judge(ladder.with_cost(model), second, model)
    assert report.judge(second).waste <= theirs.waste
    (limit,) = [limit for limit in report.drift.limits if limit.kind == "shared > 0"]
    assert limit.share < 0.05 and limit.limit >= 0.12


def decodes(seed, longer, steps=2000):
    """Sequences that come and go around 64, and blocks that grow with them."""
    rng = np.random.default_rng(seed)
    level, sequences = 0.0, []
    for noise in rng.standard_normal(steps):
        level = 0.95 * level + 6 * noise
        sequences.append(int(np.clip(64 + level, 1, 128)))
    blocks = np.ceil(np.array(sequences) * (8 + rng.standard_normal(steps)) * longer)
    return Demand(("sequences", "blocks"), np.stack([sequences, blocks.astype(int)], axis=1))


@pytest.mark.slow
def test_decodes_whose_requests_grow_a_tenth_longer_stay_below_8_percent():
    axes = [Axis("sequences", 1, 128), Axis("blocks", 1, 4096)]
    model = CostModel(lambda n: 15 * n["sequences"] + 5.6 * n["blocks"])
    report = plan(decodes(0, 1.0), model, 64, axes=axes, rho=None, drift=True)
    held = report.judge(decodes(1, 1.1))
    assert held.missed == 0 and held.waste < 0.08


def test_a_first_fit_engine_is_judged_by_its_own_order():
    space = BucketSpace(NAMES, [(4, 12), (5, 2)], cost)
    needs = Demand(NAMES, [(3, 1)])
    cheap, first = (
        judge(space, needs, CostModel(cost)),
        judge(space, needs, CostModel(cost), by_size),
    )
    assert [use.share for use in cheap.uses] == [0.0, 1.0]
    assert [use.share for use in first.uses] == [1.0, 0.0]


def test_the_report_says_what_is_borne():
    demand = Demand(NAMES, [(4, 0)] * 97 + [(4, 9)] * 3)
    text = str(plan(demand, cost, 9, axes=AXES, drift=True, ladders=LADDERS))
    assert "drift: waste at most " in text and "ladder of as many graphs" in text
    assert "b > 0: 3.0% of the steps, borne up to " in text


def test_a_plan_without_drift_says_nothing_of_it():
    report = plan(Demand(NAMES, [(4, 0)]), cost, 2, axes=AXES)
    assert report.drift is None and "drift" not in str(report)
