"""Recorded graphs: what a callable launches is recorded once, and replayed at fixed addresses.

Rules for users of each backend that records (`accelerator`, `cudagraph`):

- The next replay of any graph of the same callable overwrites the outputs: use or copy them before
  (or capture with ``fresh_outputs=True``).
- Inputs are copied to fixed addresses, unless they are the graph's own `static_inputs`, filled in
  place (or the examples themselves: ``in_place=True``). Inputs that the callable writes to are
  copied back, and an input that it returns is returned.
- Parameters and buffers are used at their addresses; if one moves, the graph is stale. It is stale
  too once a sub-module, a hook or an attribute of the module changes; a global that changes goes
  unnoticed.
- All graphs of one callable share a memory pool and input buffers: capture the largest first, and
  run one at a time.
- What cannot be recorded is marked with :func:`graphs.eager_between`.
- A recording cannot be stored on disk, but the compiled code that it records can: with a stored
  inductor, a later process only records.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from graphs.backends.crossings import MarkedCount, Observer
from graphs.backends.inductor import InductorBackend
from graphs.backends.segments import CutRecording
from graphs.capture.contract import Backend, CaptureSpec, Frozen, Job
from graphs.capture.eager_between import cut_by
from graphs.capture.export_state import State, StateChanged, needs_gradients, why_stale
from graphs.capture.input_overlaps import named_tensors, watch_writes
from graphs.capture.inputs import Input, parameter_names
from graphs.capture.module_state import ModuleState
from graphs.errors import CaptureError
from graphs.watch.causes import describe_failure
from graphs.watch.compiles import note_replay

__all__ = ["RecordedBackend", "Recorder", "Recording", "StaticInputs"]


class Recording(NamedTuple):
    """A recorded call: `replay()` runs it again into `outputs`."""

    replay: Callable[[], None]
    outputs: Any
    close: Callable[[], None]


class Graph(Protocol):
    """A recorded graph of torch, or a mock of one."""

    def replay(self) -> None:
        """Run what was recorded."""

    def reset(self) -> None:
        """Free it."""


class Recorder(ABC):
    """Records what is launched on one kind of device, into one memory pool.

    Attributes:
        device: the kind of device, such as `cuda`.
    """

    device: str

    def on(self, device: torch.device) -> AbstractContextManager[object]:
        """Make a device the current one, whose streams are recorded."""
        return torch.accelerator.device_index(device.index)

    def warm(self, call: Callable[[], Any], runs: int) -> None:
        """Run on a side stream, to keep lazy initialisation out of the graph."""
        current = torch.accelerator.current_stream()
        stream = torch.Stream(current.device)
        stream.wait_stream(current)
        with stream:
            for _ in range(runs):
                call()
        current.wait_stream(stream)
        torch.accelerator.synchronize()

    @abstractmethod
    def recording(self) -> AbstractContextManager[Graph]:
        """Record what is called inside, without running it; yields its graph."""

    def record(self, call: Callable[[], Any]) -> Recording:
        """Record one call."""
        with self.recording() as graph:
            outputs = call()
        return Recording(graph.replay, outputs, graph.reset)


class RecordedBackend(Backend):
    """Captures by recording compiled or eager code.

    With symbolic sizes, recordings of several sizes share compiled code.

    Options:
        compiler: makes the code that is recorded: `inductor`, or `eager`.
        fresh_outputs: return copies, which no later replay overwrites.
        in_place: the examples are at the addresses of later inputs, such as in one buffer that
            is filled anew; the graph reads them there, and nothing is copied.

    A callable that calls functions marked with :func:`graphs.eager_between` needs
    ``compiler="eager"`` and runs once more than `warm_runs`. Its segments are compiled if it is
    `torch.compile` of a module, which breaks there.

    Args:
        recorder: makes a :class:`Recorder` for each callable.
        inductor: compiles the code that is recorded; may be a
            :class:`~graphs.store.StoredInductor`.
    """

    outputs_last = False
    blind_to = ("globals",)
    options = MappingProxyType({"compiler": "inductor", "fresh_outputs": False, "in_place": False})

    def __init__(
        self,
        recorder: Callable[[], Recorder],
        inductor: InductorBackend | None = None,
    ) -> None:
        self._recorder = recorder
        self._inductor = inductor or InductorBackend()
        self._shared: WeakKeyDictionary[Any, tuple[Recorder, StaticInputs]]
        self._shared = WeakKeyDictionary()

    def capture(self, job: Job) -> Frozen:
        """Run `warm_runs` times, then record."""
        examples, options, warm_runs = job.examples, job.options, job.spec.warm_runs
        if needs_gradients(job.function, examples):
            raise CaptureError(
                job.name, "a recorded graph has no gradients; capture under torch.no_grad()"
            )
        try:
            recorder, buffers = self._shared_by(job.function)
            device, host = _devices_of(recorder.device, job)
            with recorder.on(device) if device else nullcontext():
                statics = [*examples] if options["in_place"] else buffers.of(examples)
                writes = _Writes(examples, statics)
                written = watch_writes(named_tensors(job.function, statics))
                code = Frozen(job.function)
                if options["compiler"] != "eager":
                    if host:  # no marked function reads it, as there can be none
                        raise _misplaced(min(host), torch.device("cpu"), device)
                    inner = self._compiling(replace(job, examples=statics))
                    code = inner.spec.backend.capture(inner)
                    warm_runs -= 1
                call = code.run
                record: Callable[..., Recording] = recorder.record
                if _calls_marked(recorder, lambda: call(*statics), max(1, warm_runs), host):
                    on_host: Any = {name: statics[index] for index, name in host.items()}
                    observer = Observer(recorder.device, on_host)
                    recorder.warm(lambda: observer.run(lambda: call(*statics)), 1)
                    record = partial(
                        _record_cut, CutRecording(job.name, observer, recorder.recording)
                    )
                writes.find()
                names = written()
                recording = record(lambda: call(*statics))
                writes.give_back(examples)
        except CaptureError:
            raise
        except Exception as error:
            raise CaptureError(job.name, describe_failure(error)) from error
        replay = _Replay(job.function, code, statics, recording, writes, options["fresh_outputs"])
        tensors = tuple(value for value in statics if isinstance(value, Tensor))
        own: dict[str, Any] = {"close": replay.close, "stale": why_stale, "written": names}
        return replace(code, run=replay, direct=None, static_inputs=tensors, **own)

    def has(self, job: Job) -> bool:
        """Whether a capture would find its compiled code in a store, and only record."""
        inner = self._compiling(job)
        return inner.spec.backend.has(inner)

    def warming_up(self) -> AbstractContextManager[object]:
        """As that of the backend that compiles."""
        return self._inductor.warming_up()

    def why_no_symbolic(self) -> str:
        """An empty string: recordings share compiled code."""
        return ""

    def _compiling(self, job: Job) -> Job:
        name = job.options["compiler"]
        inner = self._inductor if name == "inductor" else InductorBackend(name, name)
        return replace(job, spec=CaptureSpec(inner, job.name, sizes=job.spec.sizes))

    def _shared_by(self, function: Callable[..., Any]) -> tuple[Recorder, StaticInputs]:
        try:
            if function not in self._shared:
                self._shared[function] = self._recorder(), StaticInputs()
            return self._shared[function]
        except TypeError:  # it cannot be a key: its graphs share nothing
            return self._recorder(), StaticInputs()


class _Writes:
    """Finds the static inputs that the callable writes to, which have to be copied back."""

    def __init__(self, given: Sequence[Input], statics: Sequence[Input]) -> None:
        self.indices: list[int] = []
        self._statics = statics
        self._before = {
            i: (value._version, value.clone())
            for i, value in enumerate(statics)
            if isinstance(value, Tensor)
        }
        self._storages = [
            value.untyped_storage().data_ptr() if isinstance(value, Tensor) else None
            for value in given
        ]

    def find(self) -> None:
        """Compare with the inputs before the callable ran.

        Raises:
            ValueError: an input that is written to shares memory with another.
        """
        for index, (version, content) in self._before.items():
            static: Any = self._statics[index]
            if static._version != version or not torch.equal(_bytes(static), _bytes(content)):
                self.indices.append(index)
                if self._storages.count(self._storages[index]) > 1:
                    raise ValueError(
                        f"input {index} is written to and shares memory with another input: pass "
                        "tensors of their own, or keep them as buffers of the module"
                    )
        self._before.clear()

    def give_back(self, inputs: Sequence[Any]) -> None:
        """Copy what was written to the caller's tensors."""
        for index in self.indices:
            given, static = inputs[index], self._statics[index]
            if given.data_ptr() != static.data_ptr():  # type: ignore[union-attr]
                given.copy_(static)


class _Replay:
    def __init__(
        self,
        function: Callable[..., Any],
        code: Frozen,
        statics: Sequence[Input],
        recording: Recording,
        writes: _Writes,
        fresh_outputs: bool,
    ) -> None:
        self._state, self._module = State(function), ModuleState.of(function)
        self._addresses = [tensor.data_ptr() for tensor in self._state.now()]
        self._statics = [(i, value) for i, value in enumerate(statics) if isinstance(value, Tensor)]
        self._recording: Recording | None = recording
        self._code: Frozen | None = code  # holds the kernels that were recorded
        self._writes = writes
        self._fresh_outputs = fresh_outputs
        leaves, self._spec = pytree.tree_flatten(recording.outputs)
        own = {id(static): index for index, static in self._statics}
        self._inputs_returned = {
            at: own[id(leaf)] for at, leaf in enumerate(leaves) if id(leaf) in own
        }

    def __call__(self, *inputs: Any) -> Any:
        recording = self._recording
        assert recording is not None  # a closed graph is never called
        self._expect_unchanged()
        for index, static in self._statics:
            if inputs[index].data_ptr() != static.data_ptr():
                static.copy_(inputs[index], non_blocking=True)
        recording.replay()
        note_replay()
        self._writes.give_back(inputs)
        if not (self._fresh_outputs or self._inputs_returned):
            return recording.outputs
        leaves = pytree.tree_leaves(recording.outputs)
        if self._fresh_outputs:
            leaves = [each.clone() if isinstance(each, Tensor) else each for each in leaves]
        for at, index in self._inputs_returned.items():
            leaves[at] = inputs[index]
        return pytree.tree_unflatten(leaves, self._spec)

    def close(self) -> None:
        if self._recording is not None:
            self._recording.close()
        self._recording = self._code = None
        self._statics.clear()

    def _expect_unchanged(self) -> None:
        if what := self._module.changed():
            raise StateChanged(what)
        now = self._state.now()
        if [tensor.data_ptr() for tensor in now] != self._addresses:
            both = zip(self._state.specs, now, self._addresses, strict=True)
            moved = [spec.name for spec, tensor, address in both if tensor.data_ptr() != address]
            raise StateChanged(f"tensor '{moved[0]}' has moved; write to it in place")


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)  # NaN is not equal to itself


def _record_cut(cut: CutRecording, call: Callable[[], Any]) -> Recording:
    return Recording(cut.replay, cut.record(call), cut.close)


def _devices_of(kind: str, job: Job) -> tuple[torch.device | None, dict[int, str]]:
    """The device of the inputs, None without any, and those on the host by index, with names.

    Raises:
        ValueError: they are on several devices, or none is on one of this kind.
    """
    tensors = {i: value for i, value in enumerate(job.examples) if isinstance(value, Tensor)}
    devices = [value.device for value in tensors.values() if value.device.type == kind]
    names = parameter_names(job.function, len(job.examples))
    host: dict[int, str] = {}
    for index, value in tensors.items():
        if devices and value.device.type == "cpu" != kind:
            host[index] = names[index]
        elif value.device not in devices[:1]:
            raise _misplaced(index, value.device, devices[0] if devices else kind)
    return devices[0] if devices else None, host


def _misplaced(index: int, device: torch.device, expected: object) -> ValueError:
    return ValueError(
        f"input {index} is on {device}; expected all tensors on {expected}, since a recorded graph "
        "cannot read another device: move it there"
    )


def _calls_marked(
    recorder: Recorder, call: Callable[[], Any], runs: int, host: Mapping[int, str]
) -> bool:
    """Run a callable; whether it calls functions marked with `eager_between`.

    Raises:
        ValueError: it does not, but there are inputs on the host.
    """
    marked, failure = MarkedCount(), None
    try:
        with cut_by(marked):
            recorder.warm(call, runs)
    except Exception as error:
        failure = error
    if host and not marked.calls:
        raise _misplaced(min(host), torch.device("cpu"), recorder.device) from failure
    if failure is not None:
        raise failure
    return marked.calls > 0


class StaticInputs:
    """Inputs at fixed addresses, in buffers that all graphs of one callable share.

    The first capture decides how large the buffers are. A graph that needs more gets a new buffer;
    the others stay at their addresses.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, torch.device], Tensor] = {}

    def of(self, examples: Sequence[Input]) -> list[Input]:
        """Copy tensors to fixed addresses, with shapes and strides; constants stay as they are."""
        # Not inference tensors: these have no version, so writes would go unseen.
        with torch.inference_mode(False), torch.no_grad():
            return [
                self._view(index, value).copy_(value) if isinstance(value, Tensor) else value
                for index, value in enumerate(examples)
            ]

    def _view(self, index: int, like: Tensor) -> Tensor:
        extent = 1 + sum((n - 1) * step for n, step in zip(like.shape, like.stride(), strict=True))
        needed = extent * like.element_size() if like.numel() else 0
        flat = self._buffer(index, like.device, needed)[:needed].view(like.dtype)
        return flat.as_strided(like.shape, like.stride())

    def _buffer(self, index: int, device: torch.device, needed: int) -> Tensor:
        buffer = self._buffers.get((index, device))
        if buffer is None or buffer.numel() < needed:
            buffer = torch.zeros(needed, dtype=torch.uint8, device=device)
            self._buffers[index, device] = buffer
        return buffer
