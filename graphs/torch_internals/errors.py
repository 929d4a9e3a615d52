"""Inspects errors of Dynamo."""

from __future__ import annotations

__all__ = ["first_hint", "is_of_dynamo"]

_HINT = "Hint:"


def is_of_dynamo(error: BaseException) -> bool:
    """Whether it is of a class of Dynamo, whose name means nothing to a user."""
    return type(error).__module__.startswith("torch._dynamo")


def first_hint(error: BaseException) -> str:
    """Return the first hint in an error of Dynamo, or an empty string."""
    lines = (line.strip() for line in str(error).splitlines())
    return next((each.removeprefix(_HINT).strip() for each in lines if each.startswith(_HINT)), "")
