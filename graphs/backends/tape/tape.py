"""Tapes of the modules that inductor writes, and what they have in common."""

from __future__ import annotations

import contextlib
import importlib
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from operator import itemgetter
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graphs.backends.tape.player import Player
from graphs.backends.tape.recorder import NotTaped, Recorder, Recording
from graphs.watch.compiles import note_replay

__all__ = ["Tape", "TapedCall", "Tapes"]

_log = logging.getLogger(__name__)

_TAPES: ContextVar[Tapes | None] = ContextVar("tapes of what is captured", default=None)
_LOAD = "load_by_key_path"  # of inductor's cache of modules; other torches have none
_GARBAGE = 0xFF  # as floats NaN, as integers -1


class Tapes:
    """The tapes of some graphs that run one at a time, and the memory that these share.

    Args:
        player: makes the calls.
        repeats: whether a graph may run twice on the inputs that it is taped on, and then gives the
            same: its tape is compared with it before it is used.

    Attributes:
        player, repeats: as given.
        made: how many tapes there are.
        refused: how many runs could not be taped, by the reason.
    """

    def __init__(self, player: Player, *, repeats: bool = False) -> None:
        self.player, self.repeats = player, repeats
        self.made = 0
        self.refused: Counter[str] = Counter()
        self._arena = torch.empty(0, dtype=torch.uint8)
        self._in_use = threading.Lock()

    @contextlib.contextmanager
    def taping(self) -> Iterator[None]:
        """While entered, graphs that inductor loads in this thread get tapes of what they run."""
        before = _TAPES.set(self)
        try:
            with _LOADING:
                yield
        finally:
            _TAPES.reset(before)

    @contextlib.contextmanager
    def arena(self, size: int) -> Iterator[Tensor | None]:
        """Room for what a graph makes on its way, or None while another thread has it."""
        if not self._in_use.acquire(blocking=False):
            yield None
            return
        try:
            if len(self._arena) < size:
                self._arena = torch.empty(size, dtype=torch.uint8)
            yield self._arena
        finally:
            self._in_use.release()


class _Loading:
    """Gives modules that inductor loads a taped call, where the thread is to tape them.

    As long as one of several threads has entered it.
    """

    def __init__(self) -> None:
        self._changing = threading.RLock()
        self._entered = 0
        self._before: Any = None

    def __enter__(self) -> None:
        with self._changing:
            cache = _cache_of_modules()
            if self._entered == 0 and hasattr(cache, _LOAD):
                self._before, load = vars(cache)[_LOAD], getattr(cache, _LOAD)
                setattr(cache, _LOAD, staticmethod(partial(_load_taped, load)))
            self._entered += 1

    def __exit__(self, *_: object) -> None:
        with self._changing:
            self._entered -= 1
            if self._entered == 0 and self._before is not None:
                setattr(_cache_of_modules(), _LOAD, self._before)
                self._before = None


_LOADING = _Loading()


def _cache_of_modules() -> Any:
    return getattr(importlib.import_module("torch._inductor.codecache"), "PyCodeCache", None)


def _load_taped(load: Callable[..., ModuleType], *args: Any, **kwargs: Any) -> ModuleType:
    module = load(*args, **kwargs)
    return module if _TAPES.get() is None else _with_taped_call(module)


class TapedCall:
    """The call of a module that inductor wrote, with a tape for each of the sizes it ran at.

    Args:
        module: what inductor wrote. Its call takes a list of sizes and tensors, and empties it.
    """

    def __init__(self, module: ModuleType) -> None:
        self._module, self._call = module, module.call
        self._tapes: dict[Any, Tape | None] = {}
        self._sizes: Callable[[Sequence[Any]], Any] | None = None

    def __call__(self, args: list[Any]) -> Any:
        """Plays the tape of these sizes; without one, makes it while graphs are taped, or runs."""
        if self._sizes is None:
            self._sizes = _getter([i for i, arg in enumerate(args) if type(arg) is int])
        sizes = self._sizes(args)
        tape = self._tapes.get(sizes)
        if tape is not None:
            made = tape.play(args)
            if made is not None:
                args.clear()
                return made
        elif sizes not in self._tapes and (tapes := _TAPES.get()) is not None:
            return self._tape(args, sizes, tapes)
        return self._call(args)

    def _tape(self, args: list[Any], sizes: Any, tapes: Tapes) -> Any:
        """Runs and tapes it."""
        self._tapes[sizes] = None
        given = [*args]
        recorder = Recorder(self._module, given, tapes.player)
        with recorder.recording():
            made = self._call(args)
        try:
            tape = Tape(recorder.finish(made), tapes)
            if tapes.repeats:
                again = tape.play(given, _GARBAGE)
                if again is None or not all(map(_are_equal, made, again)):
                    raise NotTaped("played again, it makes something else")
        except NotTaped as reason:
            tapes.refused[str(reason)] += 1
            _log.info("%s has no tape: %s", self._module.__name__, reason)
        else:
            self._tapes[sizes] = tape
            tapes.made += 1
        return made


class Tape:
    """The calls of a run, to be made again on inputs of the same sizes, wherever these lie.

    Args:
        recording: of the run.
        tapes: those with which it shares its player and its arena. It does not keep them.
    """

    def __init__(self, recording: Recording, tapes: Tapes) -> None:
        # Dynamo keeps what it compiled, so that the memory of closed graphs would stay with it.
        self._tapes = weakref.ref(tapes)
        self._arena_bytes, self._memories = recording.arena_bytes, recording.memories
        self._outputs = recording.outputs
        self._inputs = _getter(recording.inputs)
        self._words, self._at, self._base, self._offset = (
            np.array(each, np.int64)
            for each in (recording.words, recording.at, recording.base, recording.offset)
        )

    def play(self, args: Sequence[Any], garbage: int | None = None) -> list[Tensor] | None:
        """What the graph returns of inputs like those of its run.

        None: a call failed, another thread plays just now, or the tapes are no more: let the graph
        itself run.

        Args:
            args: sizes and tensors.
            garbage: a byte that outputs and arena are filled with before.
        """
        tapes = self._tapes()
        if tapes is None:
            return None
        with tapes.arena(self._arena_bytes) as arena:
            if arena is None:
                return None
            memories = [torch.UntypedStorage(size) for size in self._memories]
            if garbage is not None:
                each: Any
                for each in (arena.untyped_storage(), *memories):
                    each.fill_(garbage)
            bases = [*map(Tensor.data_ptr, (*self._inputs(args), arena))]
            bases += [each.data_ptr() for each in memories]
            self._words[self._at] = np.array(bases, np.int64)[self._base] + self._offset
            if not tapes.player.play(self._words):
                return None
        note_replay()
        return [output.of(memories) for output in self._outputs]


def _with_taped_call(module: ModuleType) -> ModuleType:
    """A module like it, as inductor keeps the one that it loaded for others."""
    taped = ModuleType(module.__name__, module.__doc__)
    taped.__dict__.update(vars(module))
    taped.call = TapedCall(module)  # type: ignore[attr-defined]
    return taped


def _getter(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    if len(places) > 1:
        return itemgetter(*places)
    return lambda values: tuple(values[place] for place in places)


def _are_equal(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, as NaN is not equal to itself."""
    bits = (each.contiguous().view(-1).view(torch.uint8) for each in (a, b))
    return torch.equal(*bits)
