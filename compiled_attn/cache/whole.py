"""The check of an integer argument."""

from __future__ import annotations

import operator

__all__ = ["whole"]


def whole(name: str, value: int, minimum: int) -> int:
    """Return ``value`` as an int of at least ``minimum``, or raise an error that names it."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"expected an integer {name}, got {value!r}: pass an int") from None
    if number < minimum:
        raise ValueError(f"expected {name} >= {minimum}, got {number}: pass a larger one")
    return number
