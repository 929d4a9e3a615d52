"""Errors of Dynamo and inductor: whose they are, and what they advise."""

from __future__ import annotations

__all__ = ["first_hint", "is_of_dynamo"]

_HINT = "Hint:"


def is_of_dynamo(error: BaseException) -> bool:
    """Whether Dynamo raised it, so that its class says nothing to a user."""
    return type(error).__module__.startswith("torch._dynamo")


def first_hint(error: BaseException) -> str:
    """The first hint that Dynamo gives, or an empty string."""
    lines = (line.strip() for line in str(error).splitlines())
    return next((each.removeprefix(_HINT).strip() for each in lines if each.startswith(_HINT)), "")
