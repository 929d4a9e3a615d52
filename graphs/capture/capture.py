"""`capture`: freezes a callable at fixed shapes, with any backend."""

from __future__ import annotations

import gc
import re
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from graphs.backends import BACKENDS
from graphs.capture.contract import Backend, CaptureSpec, Job
from graphs.capture.frozen import Frozen
from graphs.capture.input_overlaps import InputOverlaps
from graphs.capture.inputs import Input, InputsCheck, InputSpec, name_of
from graphs.capture.memory import bytes_in_use
from graphs.capture.settings import Settings
from graphs.capture.structure import CallStructure, as_call, by_position, flat_call
from graphs.errors import CaptureError, InputMismatch, ModeMismatch, StaleGraph
from graphs.watch.compiles import note_capture

__all__ = [
    "CapturedGraph",
    "available_backends",
    "capture",
    "collection_paused",
    "median_seconds",
    "resolve",
    "spec_of",
]

_LONG_ENOUGH = 0.1
# Dynamo sees the inputs through `with_own_code`, which names them by position.
_WRAPPED_INPUT = re.compile(r"(?:L\['inputs'\]|inputs)\[(\d+)\]")


class CapturedGraph:
    """A callable frozen at the shapes of its examples; made by :func:`capture`.

    Attributes:
        name: what errors call it.
        backend: name of the backend.
        seconds: how long the capture took, its warm runs included.
        bytes: growth of the memory in use (reserved on accelerators, resident on the host), at
            least 0.
        static_inputs: tensors at fixed addresses to fill in place; empty where the backend has
            none.
        input_specs: name, shape, dtype, device and stride of each input, or its constant; nested
            inputs are flat here, with names such as ``cache['k'][0]``.
        settings: the settings of torch that it was captured under and has to run under.
        is_loaded: whether it came from a store (:mod:`graphs.store`) instead of a compiler.
        shared_as: name of the compiled graph, where captures of other sizes share it, else empty.
        why_alone: why it does not share a graph, though its sizes were to be symbolic.
        run_seconds: of the run of its capture on the host, where other captures ran the graph
            before; else None.
    """

    def __init__(
        self,
        spec: CaptureSpec,
        frozen: Frozen,
        inputs: InputsCheck,
        settings: Settings,
        seconds: float,
        bytes: int,
        overlaps: InputOverlaps | None = None,
        structure: CallStructure | None = None,
    ) -> None:
        self.name = spec.name
        self.backend = spec.backend.name
        self.seconds = seconds
        self.bytes = bytes
        self.settings = settings
        self.is_loaded = frozen.is_loaded
        self.shared_as = frozen.shared_as
        self.input_specs: tuple[InputSpec, ...] = inputs.specs
        self.static_inputs: tuple[Tensor, ...] = frozen.static_inputs
        self._without_wrappers = inputs.without_wrappers
        self.why_alone = self._with_names(frozen.why_alone)
        is_on_host = all(each.device is None or each.device.type == "cpu" for each in inputs.specs)
        self.run_seconds = frozen.run_seconds if is_on_host else None
        self._spec: CaptureSpec | None = spec
        self._frozen: Frozen | None = frozen
        self._mismatch = inputs.mismatch
        self._overlaps = overlaps
        self._structure = structure
        self._holds = _holds_of(frozen, inputs, settings)
        if overlaps is not None:
            fits, apart = self._holds, overlaps.hold
            self._holds = lambda values: fits(values) and apart(values)
        self._call = frozen.direct.run if frozen.direct else frozen.run

    def run(self, *inputs: Any, **keywords: Any) -> Any:
        """Run the graph on inputs like its examples, and return what the callable returns.

        Raises:
            InputMismatch: an input differs in shape, dtype, device, stride, constant or nesting; or
                it overlaps another tensor in memory that it did not overlap at the capture, and the
                graph writes to one of them. The graph did not run.
            ModeMismatch: grad mode, threads or another setting differs; the graph did not run.
            StaleGraph: something else that it depends on has changed, such as a global; the graph
                did not run.
            CaptureError: it is closed.
        """
        if keywords or self._structure is not None:
            inputs = self._flat(inputs, keywords)
        call = self._call if self._holds(inputs) else self._slow_path(inputs)
        try:
            return call(*inputs)
        except Exception as error:
            self._refuse_if_stale(error)
            raise

    def _flat(self, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Input, ...]:
        if self._structure is not None:
            return self._structure.flatten(inputs, keywords, self.name)
        names = [spec.name for spec in self.input_specs]
        return by_position(names, inputs, keywords, self.name)

    def _slow_path(self, inputs: tuple[Input, ...]) -> Callable[..., Any]:
        """Raise what differs; if nothing does, return the run with the backend's own checks."""
        now = Settings.current()
        if now != self.settings:
            changed = now.differences(self.settings)
            raise ModeMismatch(self.name, f"{changed}; restore it, or capture again under it")
        if mismatch := self._mismatch(inputs):
            raise InputMismatch(self.name, mismatch)
        if self._overlaps and (mismatch := self._overlaps.mismatch(inputs)):
            raise InputMismatch(self.name, mismatch)
        return self._frozen.run if self._frozen else self._refuse

    def _refuse_if_stale(self, error: Exception) -> None:
        reason = self._frozen.stale(error) if self._frozen else None
        if reason is not None:
            reason = self._with_names(reason)
            raise StaleGraph(self.name, f"no longer holds, capture it again: {reason}") from error

    def _with_names(self, reason: str) -> str:
        reason = self._without_wrappers(reason)
        return _WRAPPED_INPUT.sub(lambda match: self.input_specs[int(match[1])].name, reason)

    def at_sizes_of(
        self, function: Callable[..., Any], inputs: Sequence[Input]
    ) -> CapturedGraph | None:
        """Return the graph for inputs of other sizes; nothing is run or compiled.

        Args:
            function: what was captured.
            inputs: flat, with the dtypes, devices and constants of the examples.

        Returns:
            None if its sizes are not symbolic, or these do not fit its guards.
        """
        frozen = self._frozen
        if frozen is None or self._spec is None or not frozen.shared_as or frozen.static_inputs:
            return None  # recordings are of one size
        if frozen.why_not_sizes(inputs):
            return None
        check = InputsCheck(function, inputs)
        overlaps = _overlaps_of(frozen, function, inputs)
        return CapturedGraph(self._spec, frozen, check, self.settings, 0.0, 0, overlaps)

    def close(self) -> None:
        """Free what the graph holds; running it from now on is an error. May be called twice."""
        if self._frozen is None:
            return
        frozen, self._frozen, self._spec = self._frozen, None, None
        self.static_inputs, self._overlaps = (), None
        self._holds, self._call = lambda _: True, self._refuse
        frozen.close()

    def _refuse(self, *_: Input) -> NoReturn:
        raise CaptureError(self.name, "is closed; capture it again to run it")

    def __repr__(self) -> str:
        state = "closed" if self._frozen is None else f"{self.seconds:.2f} s"
        return f"CapturedGraph({self.name}, {self.backend}, {state})"


def _holds_of(
    frozen: Frozen, inputs: InputsCheck, settings: Settings
) -> Callable[[tuple[Input, ...]], bool]:
    # One evaluation of everything: what the backend's own guards look at is not looked at again.
    direct, fits, count = frozen.direct, inputs.fits, len(inputs.specs)
    if direct is None:
        are_settings = settings.watch()
        return lambda values: are_settings() and len(values) == count and fits(*values)
    if not direct.sees_sizes:
        holds = direct.holds
        return lambda values: len(values) == count and fits(*values) and holds(values)
    if not direct.unchecked:
        return direct.holds
    holds, rest = direct.holds, [(index, inputs.specs[index]) for index in direct.unchecked]
    return lambda values: (
        holds(values) and not any(spec.mismatch(values[index]) for index, spec in rest)
    )


def capture(
    callable: Callable[..., Any],
    example_inputs: Sequence[Any] | Mapping[str, Any],
    *,
    backend: str | Backend | CaptureSpec = "inductor",
    name: str | None = None,
    **options: Any,
) -> CapturedGraph:
    """Freeze a callable or `nn.Module` at the shapes of its example inputs.

    The callable really runs on the examples, `warm_runs` times, and its in-place writes happen:
    pass examples that do no harm (an unused cache slot). The grad mode and the
    other :class:`~graphs.capture.settings.Settings` of this moment become part of the graph.

    Args:
        callable: takes the inputs.
        example_inputs: by position (a tuple or list) or by keyword (a dict): tensors, None, plain
            constants, which are captured with their value, and containers of these: dicts, lists,
            tuples and classes registered with torch, such as a dataclass by
            `torch.export.register_dataclass`.
        backend: a name out of :func:`available_backends`, a backend object, or a
            :class:`~graphs.capture.contract.CaptureSpec`.
        name: for errors; default: the callable's own name.
        options: `warm_runs`, and options of the backend, such as `mode` and `options` of
            `torch.compile` for `inductor`.

    Raises:
        CaptureError: unknown or unavailable backend, a graph break (with the user's line), a
            failing callable.
        GraphBudgetExceeded: a strict :class:`~graphs.no_compile` is armed.
        TypeError: the inputs are not a tuple, list or dict, one of them is of an unknown class, or
            the backend does not know an option. Nothing ran.
        ValueError: `warm_runs` is below 1.
    """
    if of_many := {"symbolic", "strict", "shared_runs"} & options.keys():
        raise TypeError(
            f"unknown option {min(of_many)!r}; it is of a WarmupManager, which captures many "
            "buckets: leave it out"
        )
    spec = spec_of(callable, backend, name or "", **options)
    args, kwargs = as_call(example_inputs, "example_inputs")
    function, examples, structure = flat_call(callable, args, kwargs)
    inputs = InputsCheck(function, examples)
    note_capture(spec.name)
    settings = Settings.current()
    devices = {value.device for value in examples if isinstance(value, Tensor)}
    before, start = bytes_in_use(devices), time.perf_counter()
    with collection_paused:
        frozen = spec.backend.capture(Job(function, examples, spec))
    _wait_for(devices)
    seconds, grown = time.perf_counter() - start, bytes_in_use(devices) - before
    overlaps = _overlaps_of(frozen, function, examples)
    size = max(0, grown)
    return CapturedGraph(spec, frozen, inputs, settings, seconds, size, overlaps, structure)


def _overlaps_of(
    frozen: Frozen, function: Callable[..., Any], examples: Sequence[Input]
) -> InputOverlaps | None:
    if frozen.written is None or frozen.written:
        return InputOverlaps(function, examples, frozen.written)
    return None


def median_seconds(graph: CapturedGraph, inputs: Sequence[Input], runs: int) -> float:
    """Time up to `runs` runs of a graph, but end after a tenth of a second; the median of them."""
    devices = {value.device for value in inputs if isinstance(value, Tensor)}
    seconds: list[float] = []
    while len(seconds) < runs and sum(seconds) < _LONG_ENOUGH:
        start = time.perf_counter()
        graph.run(*inputs)
        _wait_for(devices)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def available_backends() -> dict[str, str | None]:
    """The names of all backends, each with None, or the reason why it does not work here."""
    return {name: backend.available() for name, backend in BACKENDS.items()}


def resolve(backend: str | Backend, name: str) -> Backend:
    """Look up a backend by name; an object is returned as it is.

    Raises:
        CaptureError: it is unknown, or does not work here.
    """
    if isinstance(backend, str) and backend not in BACKENDS:
        raise CaptureError(
            name, f"unknown backend {backend!r}; expected one of {', '.join(BACKENDS)}"
        )
    return CaptureSpec(BACKENDS[backend] if isinstance(backend, str) else backend, name).backend


def spec_of(
    function: Callable[..., Any],
    backend: str | Backend | CaptureSpec,
    name: str = "",
    *,
    symbolic: Sequence[str] | None = None,
    strict: bool | None = None,
    warm_runs: int | None = None,
    shared_runs: int | None = None,
    **options: Any,
) -> CaptureSpec:
    """Build the description of a capture from a user's keywords.

    Args:
        function: gives the name, where there is no other.
        backend: a name, an object, or a spec, of which the keywords replace fields.
        name, symbolic, strict, warm_runs, shared_runs, options: fields of
            :class:`~graphs.capture.contract.CaptureSpec`.

    Raises:
        CaptureError, TypeError, ValueError: see there.
    """
    fields = {
        "symbolic": symbolic,
        "strict": strict,
        "warm_runs": warm_runs,
        "shared_runs": shared_runs,
    }
    given: dict[str, Any] = {field: value for field, value in fields.items() if value is not None}
    if isinstance(backend, CaptureSpec):
        given |= {"name": name or backend.name or name_of(function)}
        return replace(backend, options={**backend.options, **options}, **given)
    name = name or name_of(function)
    return CaptureSpec(resolve(backend, name), name, options, **given)


def _wait_for(devices: set[torch.device]) -> None:
    for device in devices:
        if device.type not in ("cpu", "meta"):
            torch.accelerator.synchronize(device)


class _CollectionPaused:
    """A context manager that any number of threads may enter; the last one to leave resumes.

    A compile makes millions of objects that live until its end, and each collection would visit
    them and all that torch has loaded.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._was_enabled = False

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside and self._was_enabled:
                gc.enable()


collection_paused = _CollectionPaused()
