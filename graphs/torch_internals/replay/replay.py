"""Replays of the modules that inductor writes, and what they share."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from operator import itemgetter
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graphs.torch_internals.features import Feature, Patch, SharedPatch
from graphs.torch_internals.replay.calls import Replayer
from graphs.torch_internals.replay.recorder import NotReplayable, Recorder, Recording, watch_calls
from graphs.watch.causes import describe_failure
from graphs.watch.compiles import note_replay

__all__ = ["REPLAY", "Replay", "ReplayedCall", "Replays", "replay_loads"]

_log = logging.getLogger(__name__)

_ACTIVE: ContextVar[Replays | None] = ContextVar("replays of what is captured", default=None)
_GARBAGE = 0xFF  # as floats NaN, as integers -1


class Replays:
    """The replays of some graphs, and the arenas that they share.

    Args:
        replayer: makes the native calls.
        verify: replay the first recording of each compiled graph once into memory full of NaN, and
            require outputs of the same bits. Only for callables that may run twice on their
            examples; what they write to inputs is not compared.

    Attributes:
        replayer, verify: as given.
        enabled: while false, graphs run as inductor wrote them.
        on_run: called with each replay and its inputs before it runs; None: nothing is.
        recorded: how many replays there are.
        refused: how many runs could not be recorded, by reason.

    Raises:
        TypeError: `replayer` is none.
    """

    def __init__(self, replayer: Replayer, *, verify: bool = False) -> None:
        if not (hasattr(replayer, "recording") and hasattr(replayer, "call_of")):
            raise TypeError(
                f"expected a Replayer, got {type(replayer).__name__}: take that of native kernels, "
                "or capture without replays"
            )
        self.replayer, self.verify = replayer, verify
        self.enabled = True
        self.recorded = 0
        self.refused: Counter[str] = Counter()
        self.on_run: Callable[[Replay, Sequence[Any]], object] | None = None
        self._arenas: list[Tensor] = []

    def record(self, function: Callable[[], Any]) -> Any:
        """Call a function; graphs that inductor loads in it are recorded at their first run."""
        token = _ACTIVE.set(self)
        try:
            return function()
        finally:
            _ACTIVE.reset(token)

    def take_arena(self, size: int) -> Tensor:
        """Memory for intermediate results, for the caller alone until `return_arena`."""
        try:
            arena = self._arenas.pop()
        except IndexError:  # also where another thread was faster
            arena = None
        if arena is None or len(arena) < size:
            arena = torch.empty(size, dtype=torch.uint8, device="cpu")
        return arena

    def return_arena(self, arena: Tensor) -> None:
        """Leave an arena to the next run."""
        self._arenas.append(arena)


class ReplayedCall:
    """The `call` of a module that inductor wrote, with a replay for each set of recorded sizes.

    Args:
        module: its `call` takes a list of sizes and tensors, and empties it.
    """

    def __init__(self, module: ModuleType) -> None:
        self._name, self._call = module.__name__, module.call
        self._why_not = watch_calls(module)
        self._by_sizes: dict[Any, Replay | None] = {}
        self._sizes: Callable[[Sequence[Any]], Any] | None = None

    def __call__(self, args: list[Any]) -> Any:
        """Replay; or record, where replays are active and these sizes are new; or just run."""
        if self._sizes is None:
            self._sizes = _getter([i for i, arg in enumerate(args) if type(arg) is int])
        sizes = self._sizes(args)
        replay = self._by_sizes.get(sizes)
        if replay is not None and (replays := replay.replays()) is not None and replays.enabled:
            if replays.on_run is not None:
                replays.on_run(replay, args)
            made = replay.run(args, replays)
            args.clear()
            return made
        if sizes not in self._by_sizes and (active := _ACTIVE.get()) and REPLAY.is_on:
            return self._record(args, sizes, active)
        return self._call(args)

    def _record(self, args: list[Any], sizes: Any, replays: Replays) -> Any:
        given = [*args]
        recorder = Recorder(given, replays.replayer)
        made = self._call(args) if self._why_not else recorder.record(self._call, args)
        try:
            if self._why_not:
                raise NotReplayable(self._why_not)
            replay = Replay(recorder.finish(made), replays)
            if replays.verify and not any(self._by_sizes.values()):
                again = replay.run(given, replays, _GARBAGE)
                if not all(map(_are_equal, made, again)):
                    raise NotReplayable("its replay returns something else")
        except Exception as error:  # the run itself succeeded
            why = str(error) if isinstance(error, NotReplayable) else describe_failure(error)
            self._by_sizes[sizes] = None
            replays.refused[why] += 1
            _log.info("%s is not replayed: %s", self._name, why)
        else:
            self._by_sizes[sizes] = replay
            replays.recorded += 1
        return made


class Replay:
    """The calls of a run, to repeat on inputs of the same sizes at any address.

    Args:
        recording: of the run.
        replays: those that it belongs to.

    Attributes:
        replays: returns these, or None once nobody holds them: Dynamo never drops what it compiled,
            which must not keep the memory of closed graphs.
    """

    def __init__(self, recording: Recording, replays: Replays) -> None:
        self.replays = weakref.ref(replays)
        self._arena_bytes, self._storages = recording.arena_bytes, recording.storages
        self._outputs = recording.outputs
        self._indices, self._inputs = recording.inputs, _getter(recording.inputs)
        self._words, self._at, self._base, self._offset = (
            np.array(each, np.int64)
            for each in (recording.words, recording.at, recording.base, recording.offset)
        )

    def recording(self) -> Recording:
        """Return what it was made of."""
        return Recording(
            self._words,
            self._at,
            self._base,
            self._offset,
            self._indices,
            self._arena_bytes,
            self._storages,
            self._outputs,
        )

    def run(
        self, args: Sequence[Any], replays: Replays, garbage: int | None = None
    ) -> list[Tensor]:
        """Return what the graph returns for inputs of the recorded sizes.

        Args:
            args: sizes and tensors.
            replays: whose replayer and arena to use.
            garbage: a byte to fill outputs and arena with before.

        Raises:
            RuntimeError: a call failed, as it does in the graph itself.
        """
        arena = replays.take_arena(self._arena_bytes)
        try:
            storages = [torch.UntypedStorage(size, device="cpu") for size in self._storages]
            if garbage is not None:
                each: Any
                for each in (arena.untyped_storage(), *storages):
                    each.fill_(garbage)
            bases = [*map(Tensor.data_ptr, (*self._inputs(args), arena))]
            bases += [each.data_ptr() for each in storages]
            words = self._words.copy()  # other threads may replay at the same time
            words[self._at] = np.array(bases, np.int64)[self._base] + self._offset
            replays.replayer.replay(words)
        finally:
            replays.return_arena(arena)
        note_replay()
        return [output.of(storages) for output in self._outputs]


class _Loader:
    """Inductor's loader of modules; gives them a `ReplayedCall` where replays are active."""

    def __init__(self, load: Callable[..., ModuleType]) -> None:
        self._load = load

    def __call__(self, *args: Any, **kwargs: Any) -> ModuleType:
        module = self._load(*args, **kwargs)
        call = getattr(module, "call", None)  # modules of kernels have none
        is_done = call is None or isinstance(call, ReplayedCall)
        if is_done or _ACTIVE.get() is None or not REPLAY.is_on:
            return module
        copy = ModuleType(module.__name__, module.__doc__)  # inductor caches the original
        copy.__dict__.update(vars(module))
        copy.call = ReplayedCall(module)  # type: ignore[attr-defined]
        return copy


def replay_loads() -> AbstractContextManager[object]:
    """Within it, the graphs that inductor loads get a `ReplayedCall`, if replays are active."""
    is_active = _ACTIVE.get() is not None and REPLAY.is_on
    return _PATCH if is_active else nullcontext()


def _replacements() -> list[Patch]:
    from torch._inductor.codecache import PyCodeCache

    cache: Any = PyCodeCache
    return [Patch(cache, _LOADER, staticmethod(_Loader(getattr(cache, _LOADER))))]


def _probe() -> str:
    from torch._inductor.codecache import PyCodeCache

    return "" if callable(getattr(PyCodeCache, _LOADER, None)) else f"PyCodeCache has no {_LOADER}"


_LOADER = "load_by_key_path"
_PATCH = SharedPatch(lambda: _replacements())
REPLAY = Feature(
    "replay",
    gain="Calls the kernels of a step from C: 1.06 to 1.20 times the decode steps of small models.",
    fallback="Graphs run as inductor wrote them, in Python.",
    versions="2.11 to 2.15",
    files=("torch_internals/replay/replay.py", "torch_internals/replay/recorder.py"),
    probe=_probe,
    benchmark="benchmarks/replay.py",
)


def _getter(indices: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    if len(indices) > 1:
        return itemgetter(*indices)
    return lambda values: tuple(values[index] for index in indices)


def _are_equal(a: Tensor, b: Tensor) -> bool:
    # Bits, as NaN is not equal to itself.
    bits = (each.contiguous().view(-1).view(torch.uint8) for each in (a, b))
    return torch.equal(*bits)
