"""Demands: contents, halves, projections, and what they refuse."""

from __future__ import annotations

import numpy as np
import pytest

from compiled_attn.planner import Demand

STEPS = Demand(("tokens", "blocks"), [(1, 4), (37, 80), (1, 4), (8, 0)], [1, 2, 3, 4])


def test_a_demand_has_a_size_a_weight_and_largest_needs():
    demand = Demand(("tokens", "blocks"), [(3, 1), (2, 9)])
    assert demand.total == 2 and len(demand) == 2
    assert demand.largest == {"tokens": 3, "blocks": 9}


def test_a_histogram_has_each_need_once_with_its_weight():
    assert STEPS.histogram() == Demand(("tokens", "blocks"), [(1, 4), (8, 0), (37, 80)], [4, 4, 2])


def test_halves_are_equal_in_weight_and_in_order():
    first, second = STEPS.halves()
    assert first.points.tolist() == [[1, 4], [37, 80]] and second.total == 7
    first, second = Demand(("n",), [[1], [2], [3], [4]]).halves()
    assert first.points.tolist() == [[1], [2]] or first.total == 1
    assert len(first) + len(second) == 4
    first, second = Demand(("n",), [[1], [2]], [9, 1]).halves()
    assert (len(first), len(second)) == (1, 1)


def test_a_projection_has_the_same_needs_and_weights():
    blocks = STEPS.project(["blocks"])
    assert blocks.points.tolist() == [[4], [80], [4], [0]] and blocks.total == 10
    assert STEPS.project(["blocks", "tokens"]).project(["tokens", "blocks"]) == STEPS


def test_a_demand_cannot_be_written_to():
    with pytest.raises(ValueError, match="read-only"):
        STEPS.points[0, 0] = 5
    given = np.ones(4)
    demand = Demand(("n",), [[1], [2], [3], [4]], given)
    given[0] = 100
    assert demand.total == 4


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Demand((), [[]]), ValueError, r"expected axes, each once, got \[\]: name them"),
        (lambda: Demand(("a", "a"), [(1, 1)]), ValueError, "expected axes, each once, got"),
        (lambda: Demand(("a b",), [[1]]), ValueError, "axis name 'a b' is not usable"),
        (lambda: Demand(("a",), []), ValueError, r"expected points of shape \[n, 1\]"),
        (lambda: Demand(("a",), [(1, 2)]), ValueError, r"for each of a, got \[1, 2\]"),
        (lambda: Demand(("a",), [[1.5]]), TypeError, "expected whole numbers as sizes, got float"),
        (lambda: Demand(("a",), [[-1]]), ValueError, r"expected sizes in 0\.\.1\d+, got -1\.\.-1"),
        (lambda: Demand(("a",), [[10**13]]), ValueError, "expected sizes in 0"),
        (lambda: Demand(("a",), [[1]], [0]), ValueError, "expected 1 positive finite weights"),
        (lambda: Demand(("a",), [[1]], [1, 1]), ValueError, "one for each need, got"),
        (lambda: Demand(("a",), [[1]], [float("inf")]), ValueError, "positive finite weights"),
        (
            lambda: Demand(("a",), [[1]]).halves(),
            ValueError,
            "expected two needs to halve",
        ),
        (lambda: STEPS.project(["x"]), ValueError, "expected axes of tokens, blocks, got x"),
    ],
)
def test_what_is_no_demand_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()
