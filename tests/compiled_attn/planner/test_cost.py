"""Costs: formulas over numbers and arrays, and fits to measurements."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiled_attn.planner import CostModel

NAMES = ("a", "b")
SOME = np.array([(1, 0), (3, 7), (12, 5)])


def test_a_formula_over_arrays_and_one_over_numbers_cost_the_same():
    arrays = CostModel(lambda n: 2 * n["a"] + n["b"])
    numbers = CostModel(lambda n: 2 * math.floor(n["a"]) + float(n["b"]))
    assert arrays.of(NAMES, SOME).tolist() == numbers.of(NAMES, SOME).tolist() == [2, 13, 29]
    assert arrays({"a": 3, "b": 7}) == 13.0


def test_a_constant_costs_the_same_everywhere():
    assert CostModel(lambda n: 5).of(NAMES, SOME).tolist() == [5, 5, 5]


def test_the_product_counts_a_size_of_zero_as_one():
    assert CostModel.of_any(None).of(NAMES, SOME).tolist() == [1, 21, 60]
    assert CostModel.of_any(None)({"a": 4, "b": 0}) == 4


measurements = st.dictionaries(
    st.tuples(st.integers(1, 50), st.integers(0, 50)), st.floats(0.001, 10), min_size=1, max_size=8
)


@given(measurements)
def test_a_fit_never_falls_and_stays_between_the_measurements(measured):
    fit = CostModel.fitted(({"a": a, "b": b}, s) for (a, b), s in measured.items())
    grid = np.array([(a, b) for a in range(0, 60, 5) for b in range(0, 60, 5)])
    costs = fit.of(NAMES, grid).reshape(12, 12)
    assert (np.diff(costs, axis=0) >= -1e-9).all() and (np.diff(costs, axis=1) >= -1e-9).all()
    inside = (grid <= max(measured, key=lambda p: (min(p), p))).all(axis=1)
    assert (costs.reshape(-1)[inside] <= max(measured.values()) * (1 + 1e-9)).all()


def test_a_fit_agrees_with_measurements_that_rise():
    measured = {(1, 1): 1.0, (8, 1): 2.0, (8, 64): 7.0, (64, 64): 30.0}
    fit = CostModel.fitted(({"a": a, "b": b}, s) for (a, b), s in measured.items())
    assert [fit({"a": a, "b": b}) for a, b in measured] == pytest.approx([*measured.values()])
    assert 2.0 < fit({"a": 8, "b": 32}) < 7.0


def test_measurements_that_fall_where_a_size_grows_are_averaged():
    fit = CostModel.fitted([({"a": 1}, 3.0), ({"a": 2}, 1.0)])
    assert fit({"a": 1}) == fit({"a": 2}) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("measured", "message"),
    [
        ([], "expected at least one measured bucket, got none: warm up first"),
        ([({"a": 1}, 0.0)], "expected sizes of a and positive seconds, got"),
        ([({"a": 1}, math.inf)], "measure again"),
        ([({"a": 1}, 1.0), ({"b": 1}, 1.0)], "expected sizes of a and positive seconds, got"),
    ],
)
def test_what_cannot_be_fitted_is_refused(measured, message):
    with pytest.raises(ValueError, match=message):
        CostModel.fitted(measured)


def test_a_cost_that_is_negative_or_not_finite_names_its_point():
    with pytest.raises(ValueError, match=r"expected finite costs from 0 on, got -2.0 for .*'a': 1"):
        CostModel(lambda n: n["a"] - 3).of(NAMES, SOME)
    with pytest.raises(ValueError, match="expected finite costs from 0 on, got nan"):
        CostModel(lambda n: float("nan")).of(NAMES, SOME)
