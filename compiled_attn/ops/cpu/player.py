"""Plays tapes: calls of inductor's kernels, our ops and torch's products, made by the library."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiled_attn.ops.cpu.torch_products import TorchProducts
from compiled_attn.ops.schema import schemas
from graphs.torch_internals.replay.calls import Call

__all__ = ["NativePlayer"]

_MOST_WORDS = 64  # `kMostWords` of csrc/abi.h


class NativePlayer:
    """A `replay.calls.Replayer` of a loaded library, whose ops note their calls.

    Args:
        library: of `compiled_attn.ops.cpu.build.build`.
        namespace: of its ops.
    """

    max_args = _MOST_WORDS

    def __init__(self, library: Path, namespace: str) -> None:
        self.ops = frozenset(f"{namespace}::{name}" for name in schemas())
        self._library = native = ctypes.CDLL(str(library))
        self.entry = ctypes.cast(native.compiled_attn_call, ctypes.c_void_p).value or 0
        self._play = native.compiled_attn_play
        self._play.argtypes, self._play.restype = (ctypes.c_void_p, ctypes.c_int64), ctypes.c_char_p
        self._note_calls, self._give = native.compiled_attn_note_calls, native.compiled_attn_noted
        self._give.restype = ctypes.c_int64
        self._products = TorchProducts(native)

    @contextlib.contextmanager
    def recording(self) -> Iterator[Callable[[], Call | None]]:
        """While entered, the ops note their calls in this thread; the function gives the last."""
        try:
            self._note_calls(1)
            yield self._noted
        finally:
            self._note_calls(0)

    def call_of(
        self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], made: Any
    ) -> Call | None:
        """The call that does what a matrix product of torch did; None: it was another op."""
        return self._products.call_of(op, args, kwargs, made)

    def replay(self, words: NDArray[np.int64]) -> None:
        """Makes calls, see `replay.calls.Replayer.replay`. Other threads run meanwhile.

        Raises:
            RuntimeError: one failed, as its op or kernel does, and none behind it was made.
        """
        if why := self._play(words.ctypes.data, len(words)):
            raise RuntimeError(why.decode(errors="replace"))

    def _noted(self) -> Call | None:
        words, places = ctypes.POINTER(ctypes.c_int64)(), ctypes.POINTER(ctypes.c_int64)()
        count = ctypes.c_int64()
        total = self._give(ctypes.byref(words), ctypes.byref(places), ctypes.byref(count))
        return Call(words[:total], places[: count.value]) if total else None
