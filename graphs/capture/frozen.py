"""A callable as a backend froze it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from graphs.capture.inputs import Input
from graphs.errors import CaptureError
from graphs.watch.causes import describe_failure

__all__ = ["DirectCall", "Frozen"]


@dataclass(frozen=True)
class DirectCall:
    """A shortcut to a graph, for backends with guards of their own.

    Attributes:
        holds: takes the tuple of inputs; whether the graph may run on them now: inputs, settings of
            torch and everything else that it depends on are unchanged.
        run: the graph without any check.
        unchecked: positions of inputs that `holds` ignores because the graph does not use them.
        why_not: takes the tuple of inputs; the guard that fails, or an empty string.
        sees_sizes: whether `holds` is false for inputs of other sizes than the examples.
    """

    holds: Callable[[tuple[Any, ...]], bool]
    run: Callable[..., Any]
    unchecked: tuple[int, ...] = ()
    why_not: Callable[[tuple[Any, ...]], str] = lambda _: ""
    sees_sizes: bool = True


@dataclass(frozen=True)
class Frozen:
    """A frozen callable.

    Attributes:
        run: takes inputs like the examples and returns what the callable returns.
        static_inputs: tensors at fixed addresses that `run` reads, for callers who fill them in
            place; empty if it reads what it is given.
        keep_alive: an object that must live until the graph is closed.
        close: frees what the graph holds.
        stale: takes an exception of `run`; the reason if it means that the graph no longer holds,
            else None.
        direct: replaces `run` and the checks before it while it holds; once it does not, the
            exception of `run` says why.
        is_loaded: whether it came from a store and nothing was compiled.
        shared_as: name of the compiled graph, where other captures share it.
        why_alone: why it does not share the graph of its shape group; empty if it does.
        why_not: of a graph with symbolic sizes; takes inputs of other sizes and returns why it
            cannot run on them, or an empty string.
        why_not_sizes: the same for inputs that differ from those of a capture in these sizes only.
        run_seconds: of a warm run on the host, where others ran the graph before; else None.
        written: names of the inputs, and as `self.name` of the parameters and buffers, that the
            graph writes to. Two tensors that overlap in memory, but did not at the capture, must
            not be among them. None: it may write to any.
    """

    run: Callable[..., Any]
    static_inputs: tuple[Tensor, ...] = ()
    keep_alive: object = None
    close: Callable[[], None] = lambda: None
    stale: Callable[[Exception], str | None] = lambda _: None
    direct: DirectCall | None = None
    is_loaded: bool = False
    shared_as: str = ""
    why_alone: str = ""
    why_not: Callable[[Sequence[Input]], str] = lambda _: ""
    why_not_sizes: Callable[[Sequence[Input]], str] = lambda _: ""
    run_seconds: float | None = None
    written: Collection[str] | None = ()

    def warm_up(self, examples: Sequence[Input], name: str, runs: int) -> Frozen:
        """Run it `runs` times on the examples, and return it.

        Raises:
            CaptureError: a run fails.
        """
        try:
            for _ in range(runs):
                self.run(*examples)
        except Exception as error:
            raise CaptureError(name, describe_failure(error)) from error
        return self
