"""The contract of a capture backend, and the errors that a captured graph raises.

A backend is one object in one file with a `name` and two methods:

`available()` returns None, or in one line why this backend cannot work here and what would make it
work.

`capture(function, example_inputs, *, name, warm_runs, **options)` freezes `function` at the shapes
of `example_inputs` and returns a :class:`Frozen`. It runs `function` for real `warm_runs` times, at
least once. It raises :class:`CaptureError` with one line that names the cause, and what the user
can do about it; nothing half captured is left in use. Options are keyword arguments, so that a
wrong one is a TypeError.

What a backend may rely on: inputs are tensors and plain constants; :func:`graphs.capture` compares
the inputs of each later call with the examples before the graph runs, and takes care of the mode,
of names, seconds and bytes.

What it must keep: the graph computes what `function` computes, buffers and inputs changed in place
included; with other guards than those on its inputs (a global, an attribute), a broken one never
runs a stale graph in silence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

__all__ = [
    "Backend",
    "CaptureError",
    "Direct",
    "Frozen",
    "InputMismatch",
    "ModeMismatch",
    "StaleGraph",
]


class CaptureError(RuntimeError):
    """A callable could not be captured, or a graph cannot run: `name` says which, `detail` why."""

    def __init__(self, name: str, detail: str) -> None:
        self.name = name
        self.detail = detail
        super().__init__(f"{name}: {detail}")


class InputMismatch(CaptureError):
    """An input differs from the captured one: shape, dtype, device, stride, constant, or number."""


class ModeMismatch(CaptureError):
    """A global setting of torch (grad mode, threads, ...) differs from what was captured."""


class StaleGraph(CaptureError):
    """Something outside the inputs that the graph depends on has changed; the graph did not run."""


def _nothing_to_close() -> None:
    pass


def _never_stale(_: Exception) -> str | None:
    return None


@dataclass(frozen=True)
class Direct:
    """A short way to a graph, for a backend that has guards of its own.

    Attributes:
        holds: given the tuple of inputs, whether the graph may run on them now: nothing that it
            depends on has changed, be it an input, a setting of torch, or anything else.
        run: the graph, which checks nothing.
        unchecked: places of the inputs that `holds` does not look at, since the graph does not use
            them.
    """

    holds: Callable[[tuple[Any, ...]], bool]
    run: Callable[..., Any]
    unchecked: tuple[int, ...] = ()


@dataclass(frozen=True)
class Frozen:
    """What a backend makes of a callable.

    Attributes:
        run: takes inputs like the examples, returns what the callable returns.
        static_inputs: tensors at fixed addresses that `run` reads, for callers who fill them in
            place; empty if it reads what it is given.
        close: frees what the graph holds.
        stale: given an exception of `run`, the reason if it means that the graph no longer holds,
            else None.
        direct: a way that is taken while it holds, instead of `run` and the checks before it; what
            `run` then raises says why it no longer does.
        is_loaded: whether it came from a store, and nothing was compiled.
    """

    run: Callable[..., Any]
    static_inputs: tuple[Tensor, ...] = ()
    close: Callable[[], None] = _nothing_to_close
    stale: Callable[[Exception], str | None] = _never_stale
    direct: Direct | None = None
    is_loaded: bool = False


class Backend(Protocol):
    """One way to freeze a callable; see the module's text for the contract."""

    @property
    def name(self) -> str:
        """The name it is chosen by."""

    def available(self) -> str | None:
        """Return None, or why it cannot work here."""

    @property
    def capture(self) -> Callable[..., Frozen]:
        """`capture(function, example_inputs, *, name, warm_runs, **options)`, as said above."""
