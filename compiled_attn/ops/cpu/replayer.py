"""Native replay: calls of inductor's kernels, our ops and torch's matrix products."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiled_attn.ops.cpu.aten_matmul import matmul_call
from compiled_attn.ops.schema import schemas
from graphs.torch_internals.replay.calls import Call

__all__ = ["NativeReplayer"]

_MAX_WORDS = 64  # `kMaxWords` of csrc/abi.h


class NativeReplayer:
    """A `replay.calls.Replayer` by a loaded library, whose ops record their calls.

    Args:
        library: see `compiled_attn.ops.cpu.build.build`.
        namespace: namespace of its ops.
    """

    max_args = _MAX_WORDS

    def __init__(self, library: Path, namespace: str) -> None:
        self.ops = frozenset(f"{namespace}::{name}" for name in schemas())
        self._library = native = ctypes.CDLL(str(library))
        self.entry = ctypes.cast(native.compiled_attn_call, ctypes.c_void_p).value or 0
        self._replay = native.compiled_attn_replay
        self._replay.argtypes = ctypes.c_void_p, ctypes.c_int64
        self._replay.restype = ctypes.c_char_p
        self._record_calls = native.compiled_attn_record_calls
        self._recorded_call = native.compiled_attn_recorded_call
        self._recorded_call.restype = ctypes.c_int64

    @contextlib.contextmanager
    def recording(self) -> Iterator[Callable[[], Call | None]]:
        """Records this thread's op calls while entered; the function returns the last one."""
        try:
            self._record_calls(1)
            yield self._last_call
        finally:
            self._record_calls(0)

    def call_of(
        self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], made: Any
    ) -> Call | None:
        """Returns a call that does what a matrix product of torch did; None for other ops."""
        return matmul_call(self._library, op, args, kwargs, made)

    def replay(self, words: NDArray[np.int64]) -> None:
        """Makes calls, see `replay.calls.Replayer.replay`; releases the GIL.

        Raises:
            RuntimeError: a call failed, as its op or kernel does; later ones were not made.
        """
        if error := self._replay(words.ctypes.data, len(words)):
            raise RuntimeError(error.decode(errors="replace"))

    def _last_call(self) -> Call | None:
        words, addresses = ctypes.POINTER(ctypes.c_int64)(), ctypes.POINTER(ctypes.c_int64)()
        count = ctypes.c_int64()
        references = map(ctypes.byref, (words, addresses, count))
        total = self._recorded_call(*references)
        return Call(words[:total], addresses[: count.value]) if total else None
