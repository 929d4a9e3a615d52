"""Parameters of which some run with the quick tests and all with `make test-all`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(quick: Iterable[object], values: Iterable[object]) -> list[Any]:
    """The values (or tuples) as parameters of a test, those that are not ``quick`` marked slow."""
    quick, values = [*quick], [*values]
    assert all(value in values for value in quick), f"expected some of {values}, got {quick}"
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            id=getattr(value, "__name__", str(value)),
            marks=() if value in quick else pytest.mark.slow,
        )
        for value in values
    ]
