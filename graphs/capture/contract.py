"""The contract of a capture backend: what it is asked, and what a capture gives back.

A backend is one object in one file, of a class derived from :class:`Backend`. It has to have a
name and `capture`; everything else has a default.

What a backend may rely on: inputs are tensors and plain constants; :func:`graphs.capture` compares
the inputs of each later call with the examples before the graph runs, and takes care of settings,
names, seconds and bytes.

What it must keep: the graph computes what the callable computes, buffers and inputs changed in
place included; where it has guards beyond those on its inputs (a global, an attribute), a broken
one never silently runs a stale graph.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from graphs.capture.inputs import Input
from graphs.errors import CaptureError
from graphs.watch.causes import describe_failure

if TYPE_CHECKING:
    from graphs.capture.symbolic import SymbolicSizes
    from graphs.torch_internals.replay.replay import Tapes

__all__ = ["Backend", "Direct", "Frozen", "Job"]


@dataclass(frozen=True)
class Direct:
    """A short way to a graph, for a backend that has guards of its own.

    Attributes:
        holds: given the tuple of inputs, whether the graph may run on them now: nothing that it
            depends on has changed, be it an input, a setting of torch, or anything else.
        run: the graph, which checks nothing.
        unchecked: places of the inputs that `holds` does not look at, since the graph does not use
            them.
        why_not: given the tuple of inputs, what keeps `holds` from being true, or an empty string.
        sees_sizes: whether `holds` is false for inputs of other sizes than the examples.
    """

    holds: Callable[[tuple[Any, ...]], bool]
    run: Callable[..., Any]
    unchecked: tuple[int, ...] = ()
    why_not: Callable[[tuple[Any, ...]], str] = lambda _: ""
    sees_sizes: bool = True


@dataclass(frozen=True)
class Frozen:
    """A callable as a backend froze it.

    Attributes:
        run: takes inputs like the examples, returns what the callable returns.
        static_inputs: tensors at fixed addresses that `run` reads, for callers who fill them in
            place; empty if it reads what it is given.
        keeps: what lives as long as the graph is not closed.
        close: frees what the graph holds.
        stale: given an exception of `run`, the reason if it means that the graph no longer holds,
            else None.
        direct: a way that is taken while it holds, instead of `run` and the checks before it; what
            `run` then raises says why it no longer does.
        is_loaded: whether it came from a store, and nothing was compiled.
        shared_as: name of the compiled graph, where other captures share it.
        why_alone: why it is not, or not first, the graph that others share; empty where it is.
        why_not: of a graph whose sizes are symbols, given inputs of other sizes, why it cannot run
            on them; an empty string if it can.
        run_seconds: of a warm run on the host, where others had run the graph before; else None.
        written: names of the inputs, and as `self.name` of the parameters and buffers, that the
            graph writes to: of two that overlap in memory and did not at the capture, neither may
            be one of them. None: any may be.
    """

    run: Callable[..., Any]
    static_inputs: tuple[Tensor, ...] = ()
    keeps: object = None
    close: Callable[[], None] = lambda: None
    stale: Callable[[Exception], str | None] = lambda _: None
    direct: Direct | None = None
    is_loaded: bool = False
    shared_as: str = ""
    why_alone: str = ""
    why_not: Callable[[Sequence[Input]], str] = lambda _: ""
    run_seconds: float | None = None
    written: Collection[str] | None = ()

    def warmed(self, examples: Sequence[Input], name: str, runs: int) -> Frozen:
        """The graph, after so many runs on the examples.

        Raises:
            CaptureError: it fails on them.
        """
        try:
            for _ in range(runs):
                self.run(*examples)
        except Exception as error:
            raise CaptureError(name, describe_failure(error)) from error
        return self


@dataclass(frozen=True)
class Job:
    """A capture that a backend was asked for, for the parts of it that share the work.

    Attributes:
        function, examples, name, warm_runs: those of :meth:`Backend.capture`.
        symbolic: what is shared with captures of other sizes; None: all sizes are fixed.
        mode, options: those of `torch.compile`.
        tapes: to which those of the graph are added, see
            :mod:`graphs.torch_internals.replay`; None: it has none.
    """

    function: Callable[..., Any]
    examples: Sequence[Input]
    name: str = ""
    warm_runs: int = 1
    symbolic: SymbolicSizes | None = None
    mode: str | None = None
    options: Mapping[str, Any] | None = None
    tapes: Tapes | None = None

    @property
    def dims(self) -> Sequence[Sequence[int]]:
        """The dimensions of each example that symbols stand for."""
        return self.symbolic.dims if self.symbolic else ()

    @property
    def graph_name(self) -> str:
        """The name of the compiled graph, which may be shared."""
        return self.symbolic.name if self.symbolic else self.name


class Backend(ABC):
    """One way to freeze a callable.

    Attributes:
        name: what it is chosen by.
    """

    name: str

    def available(self) -> str | None:
        """None, or in one line why it cannot work here and what would make it work."""
        return None

    @abstractmethod
    def capture(
        self,
        function: Callable[..., Any],
        example_inputs: Sequence[Input],
        *_: Any,
        **settings: Any,
    ) -> Frozen:
        """Freeze `function` at the shapes of `example_inputs`.

        Args:
            function: really runs on the examples, `warm_runs` times.
            example_inputs: in the order of its parameters.
            settings: `name: str`, for errors; `warm_runs: int`, at least 1; where
                :meth:`why_no_symbolic` allows it, `symbolic`, the
                :class:`~graphs.capture.symbolic.SymbolicSizes` of several captures, or None; and
                the backend's own options, which it declares as keyword arguments, so that a wrong
                one is a TypeError.

        Raises:
            CaptureError: in one line the cause, and what the user can do about it; nothing half
                captured is left in use.
        """

    def has(
        self,
        function: Callable[..., Any],
        example_inputs: Sequence[Input],
        *_: Any,
        **options: Any,
    ) -> bool:
        """Whether a capture would find its graph in a store; `options` are those of `capture`."""
        return False

    def why_no_symbolic(self) -> str:
        """Why captures cannot share a graph of symbolic sizes, or an empty string."""
        return f"backend {self.name!r} captures at fixed sizes only"

    def why_no_precompile(self) -> str:
        """Why :meth:`precompile` does not work here, or an empty string."""
        return f"backend {self.name!r} keeps nothing on disk"

    def precompile(
        self,
        function: Callable[..., Any],
        example_inputs: Sequence[Input],
        *_: Any,
        **settings: Any,
    ) -> None:
        """Compile into a cache on disk, from which a later capture is quick, and run nothing.

        Called in forked processes; `settings` are those of `capture` but for `warm_runs`.

        Raises:
            NotImplementedError: see :meth:`why_no_precompile`.
        """
        raise NotImplementedError(self.why_no_precompile())

    def prepare(self) -> None:
        """Load once what every :meth:`precompile` needs, for forked processes to inherit."""
        return
