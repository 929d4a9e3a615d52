"""`eager_between`: marks a function that a recorded graph must not contain."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ParamSpec, Protocol, TypeVar

import torch

from graphs.capture.inputs import name_of

__all__ = ["Cutter", "Refusal", "cut_by", "eager_between"]

_Inputs = ParamSpec("_Inputs")
_Result = TypeVar("_Result")


class Cutter(Protocol):
    """What runs marked functions while a callable is captured."""

    def call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], /
    ) -> Any:
        """Run a marked function, or return a placeholder of its result."""


# A marked function is called by the user's code, which cannot pass it on.
_CUTTER: ContextVar[Cutter | None] = ContextVar("cutter of marked functions", default=None)


@contextmanager
def cut_by(cutter: Cutter | None) -> Iterator[None]:
    """Let `cutter` run marked functions in this thread; None: they just run."""
    token = _CUTTER.set(cutter)
    try:
        yield
    finally:
        _CUTTER.reset(token)


class Refusal:
    """Refuses marked functions.

    Args:
        why: they cannot be in this capture, such as "an HPU graph is one recording".
    """

    def __init__(self, why: str) -> None:
        self._why = why

    def call(self, function: Callable[..., Any], *_: object) -> Any:
        """Raise TypeError."""
        raise TypeError(_refusal(function, self._why))


def eager_between(function: Callable[_Inputs, _Result]) -> Callable[_Inputs, _Result]:
    """Mark a function that cannot be recorded, such as a kernel with metadata on the host.

    A callable that calls it is captured by backends `cudagraph` and `accelerator`
    (``compiler="eager"``) as recorded segments, and the function runs eagerly between them at every
    replay. Backend `eager` and code outside of a capture just call it; backends that compile or
    export refuse it.

    What a segment passes to it lies at fixed addresses; what it returns is copied to fixed
    addresses, from which the next segment reads. So at every replay

    - its arguments are the same objects: what changes on the host has to change in place (a list,
      an array, an object; an attribute of a module that is replaced makes the graph stale), or it
      is a tensor on the host that the callable takes as an input and only marked functions read;
    - the tensors that it returns keep shape and dtype, and its other results their values;
    - a tensor that it makes and that segments read has to be among its results, and a tensor of a
      segment that it reads among its arguments.

    What breaks these rules is a :class:`~graphs.errors.CaptureError` that names it. An exception of
    the function leaves :meth:`~graphs.CapturedGraph.run`, after which the graph can run again.

    Raises:
        TypeError: `function` cannot be called.
    """
    if not callable(function):
        raise TypeError(
            f"eager_between: expected a function, got a {type(function).__name__}: write "
            "@graphs.eager_between above a def"
        )

    @functools.wraps(function)
    def call(*args: _Inputs.args, **kwargs: _Inputs.kwargs) -> _Result:
        if torch.compiler.is_compiling():
            raise TypeError(_refusal(function, "exported code is one graph"))
        cutter = _CUTTER.get()
        if cutter is None:
            return function(*args, **kwargs)
        with cut_by(None):
            result: _Result = cutter.call(function, args, kwargs)
            return result

    # For Dynamo, which would report only that something raises.
    traced: Callable[_Inputs, _Result] = torch.compiler.disable(
        call, reason=_refusal(function, "compiled code is one graph")
    )
    return traced


def _refusal(function: Callable[..., Any], why: str) -> str:
    return (
        f"'{name_of(function)}' is marked with eager_between, and {why}: use backend 'eager', or "
        "'cudagraph' or 'accelerator' with compiler='eager'"
    )
