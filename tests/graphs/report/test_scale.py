import itertools

import pytest

from graphs.report.scale import linear_scale, log_scale, number, size_scale


def labels(scale):
    return [tick.label for tick in scale.ticks]


@pytest.mark.parametrize(
    ("high", "expected"),
    [
        (0, ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
        (4.9, ["0", "1", "2", "3", "4", "5"]),
        (1234, ["0", "250", "500", "750", "1,000", "1,250"]),
    ],
)
def test_a_linear_axis_begins_at_0_and_has_round_labels(high, expected):
    scale = linear_scale(high)
    assert labels(scale) == expected
    assert (scale.at(0), scale.at(scale.high), scale.at(high * 9 + 1)) == (0, 100, 100)


def test_a_logarithmic_axis_has_labels_at_1_2_and_5():
    scale = log_scale(1.3, 18)
    assert labels(scale) == ["1", "2", "5", "10", "20"]
    assert scale.at(1) == 0 and scale.at(20) == 100
    assert scale.at(4) - scale.at(2) == pytest.approx(scale.at(16) - scale.at(8), abs=0.02)


def test_a_wide_logarithmic_axis_has_labels_at_powers_of_ten():
    assert labels(log_scale(0.03, 900)) == ["0.1", "1", "10", "100", "1,000"]


def test_a_logarithmic_axis_of_one_value_has_a_length():
    scale = log_scale(5, 5)
    assert scale.low < scale.high and scale.at(5) in (0, 100)


def test_sizes_that_double_are_about_evenly_spaced_and_zero_has_a_place():
    scale = size_scale([0, 64, 128, 256])
    places = [scale.at(size + 1) for size in (0, 64, 128, 256)]
    assert places[0] == 6 and places[-1] == 94
    assert places[3] - places[2] == pytest.approx(places[2] - places[1], rel=0.05)


def test_labels_of_sizes_keep_apart_and_include_both_ends():
    scale = size_scale(range(1, 300), most=6)
    places = [tick.at for tick in scale.ticks]
    assert labels(scale)[0] == "1" and labels(scale)[-1] == "299"
    assert all(b - a >= 100 / 6 for a, b in itertools.pairwise(places))
    assert labels(size_scale([7])) == ["7"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1234567, "1,234,567"),
        (12.0, "12"),
        (1411.26, "1,411"),
        (12.345, "12.3"),
        (1.5, "1.5"),
        (0.0421, "0.0421"),
        (0.0, "0"),
        (-3.14159, "-3.14"),
        (None, "–"),
    ],
)
def test_a_number_has_few_digits(value, text):
    assert number(value) == text
