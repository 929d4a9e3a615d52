"""One way in to every way of freezing a callable at fixed shapes."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from graphs.backends import BACKENDS
from graphs.backends.base import (
    Backend,
    CaptureError,
    Frozen,
    InputMismatch,
    ModeMismatch,
    StaleGraph,
)
from graphs.inputs import Input, InputsCheck, InputSpec
from graphs.memory import bytes_in_use
from graphs.mode import Mode
from graphs.sentinel import note_capture

__all__ = [
    "CaptureError",
    "CapturedGraph",
    "InputMismatch",
    "ModeMismatch",
    "StaleGraph",
    "available_backends",
    "capture",
]


# Dynamo sees the inputs through the wrapper of graphs.alone, which names them by position.
_WRAPPED_INPUT = re.compile(r"(?:L\['inputs'\]|inputs)\[(\d+)\]")


class CapturedGraph:
    """A callable frozen at the shapes of its examples; made by :func:`capture`.

    Attributes:
        name: says in errors which graph it is.
        backend: name of the backend.
        seconds: how long the capture took, its warm runs included.
        bytes: by how much the memory in use grew (reserved on accelerators, resident on the host),
            at least 0.
        static_inputs: tensors at fixed addresses to fill in place; empty where the backend has
            none.
        input_specs: name, shape, dtype, device and stride of each input, or its constant.
        mode: the settings of torch that it was captured under and has to run under.
    """

    def __init__(
        self,
        name: str,
        backend: str,
        frozen: Frozen,
        inputs: InputsCheck,
        mode: Mode,
        seconds: float,
        bytes: int,
    ) -> None:
        self.name = name
        self.backend = backend
        self.seconds = seconds
        self.bytes = bytes
        self.mode = mode
        self.input_specs: tuple[InputSpec, ...] = inputs.specs
        self.static_inputs: tuple[Tensor, ...] = frozen.static_inputs
        self._frozen: Frozen | None = frozen
        self._call = frozen.run
        self._mismatch = inputs.mismatch

    def run(self, *inputs: Input) -> Any:
        """Run the graph on inputs like its examples, and return what the callable returns.

        Raises:
            InputMismatch: an input differs in shape, dtype, device, stride or constant; the graph
                did not run.
            ModeMismatch: grad mode, threads or another setting differs; the graph did not run.
            StaleGraph: something else that it depends on has changed, such as a global; the graph
                did not run.
            CaptureError: it is closed.
        """
        mode = Mode.current()
        if mode != self.mode:
            raise ModeMismatch(
                self.name, f"{mode.differences(self.mode)}; restore it, or capture again under it"
            )
        if mismatch := self._mismatch(inputs):
            raise InputMismatch(self.name, mismatch)
        try:
            return self._call(*inputs)
        except Exception as error:
            reason = self._frozen.stale(error) if self._frozen else None
            if reason is None:
                raise
            reason = _WRAPPED_INPUT.sub(lambda match: self.input_specs[int(match[1])].name, reason)
            raise StaleGraph(self.name, f"no longer holds, capture it again: {reason}") from error

    def close(self) -> None:
        """Free what the graph holds; running it from now on is an error. May be called twice."""
        if self._frozen is None:
            return
        frozen, self._frozen = self._frozen, None
        self.static_inputs = ()
        self._call = self._refuse
        frozen.close()

    def _refuse(self, *_: Input) -> NoReturn:
        raise CaptureError(self.name, "is closed; capture it again to run it")

    def __repr__(self) -> str:
        state = "closed" if self._frozen is None else f"{self.seconds:.2f} s"
        return f"CapturedGraph({self.name}, {self.backend}, {state})"


def capture(
    callable: Callable[..., Any],
    example_inputs: Sequence[Input],
    *,
    backend: str | Backend = "inductor",
    name: str | None = None,
    warm_runs: int = 1,
    **options: Any,
) -> CapturedGraph:
    """Freeze a callable or `nn.Module` at the shapes of its example inputs.

    The callable really runs on the examples, `warm_runs` times: what it writes in place is written.
    It is up to the caller to give examples that do no harm (a cache slot that nobody uses). The
    grad mode and the other settings of this moment (:class:`~graphs.mode.Mode`) become part of the
    graph.

    Args:
        callable: takes its inputs by position.
        example_inputs: tensors, None and plain constants; the latter are captured with their value.
        backend: a name out of :func:`available_backends`, or a backend object.
        name: for errors; default: the callable's own name.
        warm_runs: how often to run it; the first run compiles.
        options: passed to the backend; `mode` and `options` of `torch.compile` for `inductor`.

    Raises:
        CaptureError: unknown or unavailable backend, a graph break (with the user's line), a
            failing callable.
        GraphBudgetExceeded: a strict :class:`~graphs.sentinel.no_compile` is armed.
        TypeError: an input is neither a tensor nor a plain constant, or the backend does not know
            an option.
        ValueError: `warm_runs` is below 1.
    """
    name = name or _name_of(callable)
    if warm_runs < 1:
        raise ValueError(f"warm_runs is {warm_runs}; expected at least 1, since a capture is a run")
    chosen = _resolve(backend, name)
    inputs = InputsCheck(callable, example_inputs)
    note_capture(name)
    mode = Mode.current()
    devices = {value.device for value in example_inputs if isinstance(value, Tensor)}
    before, start = bytes_in_use(devices), time.perf_counter()
    frozen = chosen.capture(callable, example_inputs, name=name, warm_runs=warm_runs, **options)
    _wait_for(devices)
    seconds, grown = time.perf_counter() - start, bytes_in_use(devices) - before
    return CapturedGraph(name, chosen.name, frozen, inputs, mode, seconds, max(0, grown))


def available_backends() -> dict[str, str | None]:
    """The names of all backends, each with None, or the reason why it does not work here."""
    return {name: backend.available() for name, backend in BACKENDS.items()}


def _resolve(backend: str | Backend, name: str) -> Backend:
    if isinstance(backend, str):
        if backend not in BACKENDS:
            raise CaptureError(
                name, f"unknown backend {backend!r}; expected one of {', '.join(BACKENDS)}"
            )
        backend = BACKENDS[backend]
    if reason := backend.available():
        raise CaptureError(name, f"backend {backend.name!r} is not available: {reason}")
    return backend


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", None) or type(function).__name__


def _wait_for(devices: set[torch.device]) -> None:
    for device in devices:
        if device.type not in ("cpu", "meta"):
            torch.accelerator.synchronize(device)
