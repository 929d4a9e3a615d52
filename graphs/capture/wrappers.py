"""Wrappers of a callable, and questions about one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

from torch import Tensor, nn

__all__ = ["name_of", "tensors_of", "variants_of", "with_own_code"]


def name_of(function: Callable[..., Any]) -> str:
    """The name of a function, or of the class of another callable."""
    return getattr(function, "__name__", None) or type(function).__name__


def variants_of(function: Callable[..., Any]) -> Sequence[Callable[..., Any]]:
    """Equivalent callables, the one to trace first, then simpler ones.

    A callable offers them by a method ``capture_variants()``.
    """
    variants = getattr(function, "capture_variants", None)
    return (function,) if variants is None else variants()


def tensors_of(function: Callable[..., Any]) -> list[tuple[str, Tensor]]:
    """The parameters and buffers of a module by name; none of another callable."""
    if not isinstance(function, nn.Module):
        return []
    return [*function.named_parameters(), *function.named_buffers()]


def with_own_code(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Wrap a function so that it shares no compile cache with any other.

    Dynamo caches and counts compiles per code object.
    """

    def call(*inputs: Any) -> Any:
        return function(*inputs)

    code = call.__code__.replace(co_name=name, co_qualname=name)
    return FunctionType(code, call.__globals__, name, None, call.__closure__)
