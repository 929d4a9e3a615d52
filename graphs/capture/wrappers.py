"""Wrappers of a callable, and questions about one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import FunctionType
from typing import Any

from torch import Tensor, nn

__all__ = ["as_module", "name_of", "tensors_of", "variants_of", "watch_writes", "with_own_code"]


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


def watch_writes(tensors: Iterable[tuple[str, Tensor]]) -> Callable[[], str]:
    """Return a function that names the tensors written to in place since now."""
    # A tensor of inference mode has no version.
    before = [(name, t, t._version) for name, t in tensors if not t.is_inference()]
    return lambda: ", ".join(name for name, t, version in before if t._version != version)


def with_own_code(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Wrap a function so that it shares no compile cache with any other.

    Dynamo caches and counts compiles per code object.
    """

    def call(*inputs: Any) -> Any:
        return function(*inputs)

    code = call.__code__.replace(co_name=name, co_qualname=name)
    return FunctionType(code, call.__globals__, name, None, call.__closure__)


def as_module(function: Callable[..., Any]) -> nn.Module:
    """Return the function if it is a module, else a module that calls it."""
    return function if isinstance(function, nn.Module) else _Function(function)


class _Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *inputs: Any) -> Any:
        return self._function(*inputs)
