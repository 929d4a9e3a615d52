from __future__ import annotations

import pytest

from graphs.report.tables import number


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
