"""Tapes of the modules that inductor writes, and what they have in common."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar, copy_context
from operator import itemgetter
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graphs.torch_internals.features import Feature
from graphs.torch_internals.patches import Patch, SharedPatch
from graphs.torch_internals.replay.calls import Player
from graphs.torch_internals.replay.recorder import NotTaped, Recorder, Recording, watch_calls
from graphs.watch.causes import describe_failure
from graphs.watch.compiles import note_replay

__all__ = ["REPLAY", "Tape", "TapedCall", "Tapes", "taped_loads"]

_log = logging.getLogger(__name__)

_TAPES: ContextVar[Tapes | None] = ContextVar("tapes of what is captured", default=None)
_GARBAGE = 0xFF  # as floats NaN, as integers -1


class Tapes:
    """The tapes of some graphs, and the memory that these share.

    Args:
        player: makes the calls.
        repeats: whether a graph may run twice on the inputs that it is taped on, and then returns
            the same: what the first tape of each returns is compared before it is used. What it
            writes to its inputs is not.

    Attributes:
        player, repeats: as given.
        are_played: while false, graphs run as inductor wrote them.
        made: how many tapes were made.
        refused: how many runs could not be taped, by the reason.

    Raises:
        TypeError: there is no player.
    """

    def __init__(self, player: Player, *, repeats: bool = False) -> None:
        if not (hasattr(player, "noting") and hasattr(player, "call_of")):
            raise TypeError(
                f"expected a player, got {type(player).__name__}: take that of native kernels, or "
                "capture without tapes"
            )
        self.player, self.repeats = player, repeats
        self.are_played = True
        self.made = 0
        self.refused: Counter[str] = Counter()
        self._arenas: list[Tensor] = []

    def taping(self, function: Callable[[], Any]) -> Any:
        """What a function returns; graphs that inductor loads in it get tapes of what they run."""
        context = copy_context()  # which nobody has to set back, whatever happens
        context.run(_TAPES.set, self)
        return context.run(function)

    def take_arena(self, size: int) -> Tensor:
        """Room for what a graph makes on its way, for the caller alone until it is put back.

        One that an interrupt keeps from being put back is lost, and another is made.
        """
        arena = self._arenas.pop() if self._arenas else None
        if arena is None or len(arena) < size:
            arena = torch.empty(size, dtype=torch.uint8, device="cpu")
        return arena

    def put_back(self, arena: Tensor) -> None:
        """Gives the arena to the next run."""
        self._arenas.append(arena)


class TapedCall:
    """The call of a module that inductor wrote, with a tape for each of the sizes it was taped at.

    Args:
        module: what inductor wrote. Its call takes a list of sizes and tensors, and empties it.
    """

    def __init__(self, module: ModuleType) -> None:
        self._name, self._call = module.__name__, module.call
        self._why_not = watch_calls(module)
        self._tapes: dict[Any, Tape | None] = {}
        self._sizes: Callable[[Sequence[Any]], Any] | None = None

    def __call__(self, args: list[Any]) -> Any:
        """Plays the tape of these sizes; without one, makes it while graphs are taped, or runs."""
        if self._sizes is None:
            self._sizes = _getter([i for i, arg in enumerate(args) if type(arg) is int])
        sizes = self._sizes(args)
        tape = self._tapes.get(sizes)
        if tape is not None and (tapes := tape.tapes()) is not None and tapes.are_played:
            made = tape.play(args, tapes)
            args.clear()
            return made
        if sizes not in self._tapes and (tapes := _TAPES.get()) is not None and REPLAY.is_on:
            return self._tape(args, sizes, tapes)
        return self._call(args)

    def _tape(self, args: list[Any], sizes: Any, tapes: Tapes) -> Any:
        """Runs and tapes it."""
        given = [*args]
        recorder = Recorder(given, tapes.player)
        made = self._call(args) if self._why_not else recorder.record(self._call, args)
        try:
            if self._why_not:
                raise NotTaped(self._why_not)
            tape = Tape(recorder.finish(made), tapes)
            if tapes.repeats and not any(self._tapes.values()):
                again = tape.play(given, tapes, _GARBAGE)
                if not all(map(_are_equal, made, again)):
                    raise NotTaped("played again, it returns something else")
        except Exception as error:  # the run itself is done
            why = str(error) if isinstance(error, NotTaped) else describe_failure(error)
            self._tapes[sizes] = None
            tapes.refused[why] += 1
            _log.info("%s has no tape: %s", self._name, why)
        else:
            self._tapes[sizes] = tape
            tapes.made += 1
        return made


class Tape:
    """The calls of a run, to be made again on inputs of the same sizes, wherever these lie.

    Args:
        recording: of the run.
        tapes: those that it belongs to.

    Attributes:
        tapes: gives these, or None where nobody has them any more: Dynamo keeps what it compiled,
            so that the memory of closed graphs would stay with it.
    """

    def __init__(self, recording: Recording, tapes: Tapes) -> None:
        self.tapes = weakref.ref(tapes)
        self._arena_bytes, self._memories = recording.arena_bytes, recording.memories
        self._outputs = recording.outputs
        self._inputs = _getter(recording.inputs)
        self._words, self._at, self._base, self._offset = (
            np.array(each, np.int64)
            for each in (recording.words, recording.at, recording.base, recording.offset)
        )

    def play(self, args: Sequence[Any], tapes: Tapes, garbage: int | None = None) -> list[Tensor]:
        """What the graph returns of inputs like those of its run.

        Args:
            args: sizes and tensors.
            tapes: whose player makes the calls, in one of whose arenas.
            garbage: a byte that outputs and arena are filled with before.

        Raises:
            RuntimeError: a call failed, as it does in the graph itself.
        """
        arena = tapes.take_arena(self._arena_bytes)
        try:
            memories = [torch.UntypedStorage(size, device="cpu") for size in self._memories]
            if garbage is not None:
                each: Any
                for each in (arena.untyped_storage(), *memories):
                    each.fill_(garbage)
            bases = [*map(Tensor.data_ptr, (*self._inputs(args), arena))]
            bases += [each.data_ptr() for each in memories]
            words = self._words.copy()  # for other threads may play
            words[self._at] = np.array(bases, np.int64)[self._base] + self._offset
            tapes.player.play(words)
        finally:
            tapes.put_back(arena)
        note_replay()
        return [output.of(memories) for output in self._outputs]


class _TapingLoad:
    """The loader of inductor's modules, which gives them a taped call where a thread tapes them."""

    def __init__(self, load: Callable[..., ModuleType]) -> None:
        self._load = load

    def __call__(self, *args: Any, **kwargs: Any) -> ModuleType:
        module = self._load(*args, **kwargs)
        call = getattr(module, "call", None)  # modules of kernels have none
        is_taped = call is None or isinstance(call, TapedCall)
        if is_taped or _TAPES.get() is None or not REPLAY.is_on:
            return module
        taped = ModuleType(module.__name__, module.__doc__)  # as inductor keeps its own for others
        taped.__dict__.update(vars(module))
        taped.call = TapedCall(module)  # type: ignore[attr-defined]
        return taped


def taped_loads() -> AbstractContextManager[object]:
    """Within it, what inductor loads for a graph that is taped gets a taped call."""
    is_taping = _TAPES.get() is not None and REPLAY.is_on
    return _PATCH if is_taping else nullcontext()


def _replacements() -> list[Patch]:
    from torch._inductor.codecache import PyCodeCache

    cache: Any = PyCodeCache
    return [Patch(cache, _LOADER, staticmethod(_TapingLoad(getattr(cache, _LOADER))))]


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
    benchmark="benchmarks/tapes.py",
)


def _getter(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    if len(places) > 1:
        return itemgetter(*places)
    return lambda values: tuple(values[place] for place in places)


def _are_equal(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, as NaN is not equal to itself."""
    bits = (each.contiguous().view(-1).view(torch.uint8) for each in (a, b))
    return torch.equal(*bits)
