"""The contract of a capture backend.

A backend is one object in one file, of a class derived from :class:`Backend`, with a name and a
`capture`; everything else has a default.

What a backend may rely on: inputs are tensors and plain constants; :func:`graphs.capture` compares
the inputs of each later call with the examples before the graph runs, and takes care of settings,
names, seconds and bytes.

What it must guarantee: the graph computes what the callable computes, in-place writes to buffers
and inputs included; where it has guards beyond those on its inputs (a global, an attribute), a
broken one never silently runs a stale graph. Each case of :mod:`graphs.backends.conformance` is one
of these guarantees: ``pytest --graphs-backend module:Backend``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from graphs.capture.frozen import Frozen
from graphs.capture.inputs import Input
from graphs.capture.symbolic import SymbolicSizes
from graphs.errors import CaptureError

__all__ = ["Backend", "CaptureSpec", "Frozen", "Job"]


class Backend(ABC):
    """One way to freeze a callable.

    Attributes:
        name: what users choose it by.
        options: options of its captures with their defaults; None: it takes any.
        device: the kind of device whose tensors it captures; None: any.
        outputs_last: whether outputs stay as they are when a graph of the callable runs again.
        blind_to: changes after the capture that it does not notice; of "globals" it computes the
            old result then.
    """

    name: str
    options: Mapping[str, Any] | None = MappingProxyType({})
    device: str | None = None
    outputs_last: bool = True
    blind_to: Collection[str] = ()

    def available(self) -> str | None:
        """Return None, or in one line why it cannot work here, and the remedy."""
        return None

    @abstractmethod
    def capture(self, job: Job) -> Frozen:
        """Freeze `job.function` at the shapes of `job.examples`, on which it really runs.

        Raises:
            CaptureError: in one line the cause and the remedy; nothing half captured is left in
                use.
        """

    def has(self, job: Job) -> bool:
        """Return whether a capture would find its graph in a store."""
        return False

    def warming_up(self) -> AbstractContextManager[object]:
        """Return a context manager around the captures of one warmup."""
        return nullcontext()

    def why_no_symbolic(self) -> str:
        """Return why captures cannot share a graph of symbolic sizes, or an empty string."""
        return f"backend {self.name!r} captures at fixed sizes only"


@dataclass(frozen=True)
class CaptureSpec:
    """How to capture: built once from a user's keywords, then handed down to the backend.

    Args:
        backend: freezes the callable.
        name: of the callable, for errors and logs.
        options: of the backend's captures; missing ones get the backend's defaults.
        warm_runs: how often a capture runs the callable, at least 1; the first run compiles.
        symbolic: axes of buckets whose sizes the compiled graphs leave open.
        shared_runs: how many captures run a graph that they share, at least 1, counting the one
            that compiles it; the others are only compared with its guards. None: all.
        strict: whether a :class:`~graphs.WarmupManager` raises instead of falling back.
        sizes: of one capture, what its shape group shares; None: all sizes are fixed.

    Raises:
        CaptureError: the backend is not available, or has no symbolic sizes.
        TypeError: the backend does not know an option.
        ValueError: `warm_runs` or `shared_runs` is below 1.
    """

    backend: Backend
    name: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    warm_runs: int = 1
    symbolic: Sequence[str] = ()
    strict: bool = True
    sizes: SymbolicSizes | None = None
    shared_runs: int | None = None

    def __post_init__(self) -> None:
        backend, known = self.backend, self.backend.options
        if self.warm_runs < 1:
            raise ValueError(f"warm_runs is {self.warm_runs}; expected at least 1: a capture runs")
        if self.shared_runs is not None and self.shared_runs < 1:
            raise ValueError(f"shared_runs is {self.shared_runs}; expected at least 1, or None")
        if reason := backend.available():
            raise CaptureError(self.name, f"backend {backend.name!r} is not available: {reason}")
        if self.symbolic and (reason := backend.why_no_symbolic()):
            raise CaptureError(self.name, f"{reason}: leave symbolic out, or take 'inductor'")
        if known is not None and (unknown := [each for each in self.options if each not in known]):
            raise TypeError(
                f"unknown option {unknown[0]!r}; expected the options of backend {backend.name!r} "
                f"({', '.join(known) or 'none'}): correct its name, or leave it out"
            )
        object.__setattr__(self, "options", _copied({**(known or {}), **self.options}))


def _copied(value: Any) -> Any:
    """Copy nested containers, which a user may change later, but not the objects in them."""
    if isinstance(value, Mapping):
        return {name: _copied(each) for name, each in value.items()}
    return [_copied(each) for each in value] if isinstance(value, list) else value


@dataclass(frozen=True)
class Job:
    """One capture: what a backend is asked to freeze, and how.

    Attributes:
        function: the callable.
        examples: its inputs, in the order of its parameters.
        spec: how to capture.
    """

    function: Callable[..., Any]
    examples: Sequence[Input]
    spec: CaptureSpec

    @property
    def name(self) -> str:
        """What errors and logs call the capture."""
        return self.spec.name

    @property
    def options(self) -> Mapping[str, Any]:
        """Options of the backend."""
        return self.spec.options

    @property
    def dims(self) -> Sequence[Sequence[int]]:
        """The dimensions of each example that have symbolic sizes."""
        return self.spec.sizes.dims if self.spec.sizes else ()

    @property
    def graph_name(self) -> str:
        """The name of the compiled graph, which captures may share."""
        return self.spec.sizes.name if self.spec.sizes else self.name

    def with_spec(self, **fields: Any) -> Job:
        """The same capture with other fields of its spec."""
        return replace(self, spec=replace(self.spec, **fields))

    def warm_up(self, frozen: Frozen) -> Frozen:
        """Run a graph on the examples as often as asked for; see :meth:`Frozen.warm_up`."""
        return frozen.warm_up(self.examples, self.name, self.spec.warm_runs)
