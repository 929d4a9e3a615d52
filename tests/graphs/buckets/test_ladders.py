import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs import Bucket, explicit, exponential, linear


def sizes(space):
    return [bucket.sizes[0] for bucket in space]


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ((1, 32, 100), [1, 2, 4, 8, 16, 32, 64, 96, 100]),
        ((0, 4, 10), [0, 1, 2, 4, 8, 10]),
        ((3, 8, 16), [3, 4, 8, 16]),
        ((64, 32, 128), [64, 96, 128]),
        ((1, 1, 3), [1, 2, 3]),
        ((5, 32, 5), [5]),
        ((0, 8, 0), [0]),
        ((1, 64, 16), [1, 2, 4, 8, 16]),
        ((1, 6, 7), [1, 2, 4, 6, 7]),
    ],
)
def test_linear_is_powers_of_two_below_the_step_and_multiples_from_it(parameters, expected):
    assert sizes(linear(tokens=parameters)) == expected


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ((1, 256, 9), [1, 2, 4, 8, 16, 32, 64, 128, 256]),
        ((2, 128, 7), [2, 4, 8, 16, 32, 64, 128]),
        ((10, 1000, 3), [10, 100, 1000]),
        ((1, 8, 8), [1, 2, 3, 4, 5, 6, 8]),
        ((0, 64, 4), [0, 1, 8, 64]),
        ((0, 64, 2), [0, 64]),
        ((0, 1, 9), [0, 1]),
        ((0, 0, 3), [0]),
        ((4, 9, 1), [9]),
        ((7, 7, 5), [7]),
    ],
)
def test_exponential_has_equal_ratios(parameters, expected):
    assert sizes(exponential(tokens=parameters)) == expected


@settings(deadline=None)
@given(st.integers(0, 5000), st.integers(0, 5000), st.integers(1, 600), st.integers(1, 40))
def test_ladders_rise_from_the_minimum_to_the_exact_maximum(low, more, step, points):
    high = low + more
    ladders = [sizes(linear(n=(low, step, high)))]
    if points > 1:
        ladders.append(sizes(exponential(n=(low, high, points))))
        assert len(ladders[-1]) <= points
    for ladder in ladders:
        assert ladder[0] == low and ladder[-1] == high
        assert ladder == sorted(set(ladder))


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(1, 5000))
def test_linear_never_leaves_more_than_a_step_unused_above_it(step, need):
    picked = linear(n=(1, step, 5000)).pick(n=need).n
    assert picked - need < max(step, need)


def test_several_axes_are_a_product():
    space = linear(tokens=(1, 2, 4), shared=(0, 4, 4))
    assert space.names == ("tokens", "shared")
    assert len(space) == 3 * 4
    assert space.pick(tokens=3, shared=0) == Bucket(tokens=4, shared=0)
    assert [axis.high for axis in space.axes] == [4, 4]


def test_explicit_takes_ints_on_one_axis_and_tuples_on_several():
    assert sizes(explicit(["n"], [3, 1])) == [3, 1]
    assert list(explicit(["a", "b"], [(1, 0)])) == [Bucket(a=1, b=0)]


@pytest.mark.parametrize("factory", [linear, exponential])
@pytest.mark.parametrize("parameters", [(-1, 1, 4), (5, 4, 3), (1, 2), (1, "2", 3), (1, 0, 0), 7])
def test_impossible_ladders_name_the_axis_and_the_form(factory, parameters):
    with pytest.raises(ValueError, match=r"tokens=.*expected \(min, "):
        factory(tokens=parameters)


@pytest.mark.parametrize("factory", [linear, exponential])
def test_a_ladder_without_axes_is_an_error(factory):
    with pytest.raises(ValueError, match="no axis given"):
        factory()
