"""Parameters of which some run with the quick tests and all with `make test-all`."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def slow_but(quick: Container[object], values: Iterable[object]) -> list[Any]:
    """The values (or tuples) as parameters of a test, those that are not ``quick`` marked slow."""
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            id=str(value),
            marks=() if value in quick else pytest.mark.slow,
        )
        for value in values
    ]
