"""Gives a callable its own code object, by which Dynamo keeps and counts what it compiles."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

__all__ = ["alone"]


def alone(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a function that calls `function`, and shares no compile cache with any other."""

    def call(*inputs: Any) -> Any:
        return function(*inputs)

    code = call.__code__.replace(co_name=name, co_qualname=name)
    return FunctionType(code, call.__globals__, name, None, call.__closure__)
