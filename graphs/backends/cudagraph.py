"""Explicit CUDA graphs: recorded once, replayed at fixed addresses.

Rules for users:

- The next replay of any graph of the same callable overwrites the outputs: use or copy them before
  (or capture with ``fresh_outputs=True``).
- Inputs are copied to fixed addresses, unless they are the graph's own `static_inputs`, filled in
  place (or the examples themselves: ``in_place=True``). Inputs that the callable writes to are
  copied back.
- Parameters and buffers are used at their addresses; if one moves, the graph is stale.
- All graphs of one callable share a memory pool and input buffers: capture the largest first, and
  run one at a time.
- A recording cannot be stored on disk, but the compiled code that it records can: with a stored
  inductor, a later process only records.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from graphs.backends.inductor import InductorBackend
from graphs.capture.contract import Backend, CaptureSpec, Frozen, Job
from graphs.capture.export_state import State, StateChanged, needs_gradients, why_stale
from graphs.capture.inputs import Input
from graphs.errors import CaptureError
from graphs.watch.causes import describe_failure
from graphs.watch.compiles import note_replay

__all__ = ["CudaGraphBackend", "CudaRecorder", "Recording", "StaticInputs"]


class Recording(NamedTuple):
    """A recorded call: `replay()` runs it again into `outputs`."""

    replay: Callable[[], None]
    outputs: Any
    close: Callable[[], None]


class CudaRecorder:
    """Records with `torch.cuda.CUDAGraph`, in one memory pool."""

    device = "cuda"

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._streams: dict[int, torch.cuda.Stream] = {}

    def warm(self, call: Callable[[], Any], runs: int) -> None:
        """Run on a side stream, to keep lazy initialisation out of the graph."""
        stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(runs):
                call()
        current.wait_stream(stream)
        torch.cuda.synchronize()

    def record(self, call: Callable[[], Any]) -> Recording:
        """Record what `call` does, without running it."""
        graph = torch.cuda.CUDAGraph()
        # Torch's default capture stream is on the device recorded first, and graphs share the
        # memory of their pool only on the same stream.
        device = torch.cuda.current_device()
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        with torch.cuda.graph(graph, pool=self._pool, stream=self._streams[device]):
            outputs = call()
        return Recording(graph.replay, outputs, graph.reset)


class CudaGraphBackend(Backend):
    """Captures with CUDA graphs, over compiled or eager code.

    With symbolic sizes, recordings of several sizes share compiled code.

    Options:
        compiler: makes the code that is recorded: `inductor`, or `eager`.
        fresh_outputs: return copies, which no later replay overwrites.
        in_place: the examples lie where the inputs of each run will lie, such as in one buffer that
            is filled anew; the graph reads them there, and nothing is copied.

    Args:
        recorder: makes a :class:`CudaRecorder`, or a test double, for each callable.
        inductor: compiles the code that is recorded; may be a
            :class:`~graphs.store.StoredInductor`.
    """

    name = "cudagraph"
    options = MappingProxyType({"compiler": "inductor", "fresh_outputs": False, "in_place": False})

    def __init__(
        self,
        recorder: Callable[[], CudaRecorder] = CudaRecorder,
        inductor: InductorBackend | None = None,
    ) -> None:
        self._recorder = recorder
        self._inductor = inductor or InductorBackend()
        self._shared: WeakKeyDictionary[Any, tuple[CudaRecorder, StaticInputs]]
        self._shared = WeakKeyDictionary()

    def available(self) -> str | None:
        """Needs a CUDA device, unless something else records."""
        if self._recorder is not CudaRecorder or torch.cuda.is_available():
            return None
        built = "sees no CUDA device" if torch.version.cuda else "is built without CUDA"
        return f"torch {torch.__version__} {built}; use backend 'inductor'"

    def capture(self, job: Job) -> Frozen:
        """Run `warm_runs` times, then record."""
        examples, options, warm_runs = job.examples, job.options, job.spec.warm_runs
        if needs_gradients(job.function, examples):
            raise CaptureError(
                job.name, "a recorded graph has no gradients; capture under torch.no_grad()"
            )
        try:
            recorder, buffers = self._shared_by(job.function)
            with _on(recorder.device, examples):
                statics = [*examples] if options["in_place"] else buffers.of(examples)
                writes = _Writes(examples, statics)
                code = Frozen(job.function)
                if options["compiler"] != "eager":
                    inner = self._compiling(replace(job, examples=statics))
                    code = inner.spec.backend.capture(inner)
                    warm_runs -= 1
                call = code.run
                recorder.warm(lambda: call(*statics), max(1, warm_runs))
                writes.find()
                recording = recorder.record(lambda: call(*statics))
                writes.give_back(examples)
        except CaptureError:
            raise
        except Exception as error:
            raise CaptureError(job.name, describe_failure(error)) from error
        replay = _Replay(job.function, code, statics, recording, writes, options["fresh_outputs"])
        tensors = tuple(value for value in statics if isinstance(value, Tensor))
        own: dict[str, Any] = {"static_inputs": tensors, "close": replay.close, "stale": why_stale}
        return replace(code, run=replay, direct=None, **own)

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

    def _shared_by(self, function: Callable[..., Any]) -> tuple[CudaRecorder, StaticInputs]:
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
        self._state = State(function)
        self._addresses = [tensor.data_ptr() for tensor in self._state.now()]
        self._statics = [(i, value) for i, value in enumerate(statics) if isinstance(value, Tensor)]
        self._recording: Recording | None = recording
        self._code: Frozen | None = code  # holds the kernels that were recorded
        self._writes = writes
        self._fresh_outputs = fresh_outputs

    def __call__(self, *inputs: Any) -> Any:
        recording = self._recording
        assert recording is not None  # a closed graph is never called
        self._expect_nothing_moved()
        for index, static in self._statics:
            if inputs[index].data_ptr() != static.data_ptr():
                static.copy_(inputs[index], non_blocking=True)
        recording.replay()
        note_replay()
        self._writes.give_back(inputs)
        if self._fresh_outputs:
            return pytree.tree_map_only(Tensor, torch.clone, recording.outputs)
        return recording.outputs

    def close(self) -> None:
        if self._recording is not None:
            self._recording.close()
        self._recording = self._code = None
        self._statics.clear()

    def _expect_nothing_moved(self) -> None:
        now = self._state.now()
        if [tensor.data_ptr() for tensor in now] != self._addresses:
            both = zip(self._state.specs, now, self._addresses, strict=True)
            moved = [spec.name for spec, tensor, address in both if tensor.data_ptr() != address]
            raise StateChanged(f"tensor '{moved[0]}' has moved; write to it in place")


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)  # NaN is not equal to itself


def _on(kind: str, inputs: Sequence[Input]) -> AbstractContextManager[object]:
    """Make the device of the inputs the current one, whose streams are recorded.

    Raises:
        ValueError: they are on several devices, or on one of another kind.
    """
    tensors = {i: value for i, value in enumerate(inputs) if isinstance(value, Tensor)}
    device = next((value.device for value in tensors.values() if value.device.type == kind), kind)
    for index, value in tensors.items():
        if value.device != device:
            raise ValueError(
                f"input {index} is on {value.device}; expected all tensors on {device}, since a "
                "recorded graph cannot read another device: move it there"
            )
    return torch.cuda.device(device) if kind == "cuda" and tensors else nullcontext()


class StaticInputs:
    """Inputs at fixed addresses, in buffers that all graphs of one callable share.

    The first capture decides how large the buffers are. A graph that needs more gets a new buffer;
    the others stay at their addresses.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, torch.device], Tensor] = {}

    def of(self, examples: Sequence[Input]) -> list[Input]:
        """Copy tensors to fixed addresses, with their shapes and strides; keep constants."""
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
