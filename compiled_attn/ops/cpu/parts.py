"""Kernels of 8-bit and 16-bit caches, half of a build: built when a cache needs them."""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable

import torch

from compiled_attn.errors import NativeUnavailable
from compiled_attn.ops.cpu.build import PARTS, Build, build_part, path_of_part

__all__ = ["bits_of", "call_when_missing", "check_provided", "is_divided", "provide"]

_SET_BUILDER = "compiled_attn_build_parts_by"

_log = logging.getLogger(__name__)
_lock = threading.RLock()
_provided: set[tuple[str, str, int]] = set()
_callbacks: list[object] = []  # C++ holds no references


def bits_of(cache_dtype: torch.dtype | None) -> int | None:
    """Returns the key of `PARTS` of the kernels for a cache; None: the library has them itself."""
    bits = 8 * cache_dtype.itemsize if cache_dtype is not None else None
    return bits if bits in PARTS else None


def is_divided(build: Build) -> bool:
    """Whether a loaded library has only kernels of float32 caches."""
    return hasattr(ctypes.CDLL(str(build.library)), _SET_BUILDER)


def provide(isa: str, namespace: str, bits: int, then: Callable[[], object] = lambda: None) -> None:
    """Builds a part of the best library for this processor, unless it is cached, once per process.

    Args:
        isa, namespace: of the library.
        bits: key of `PARTS`.
        then: called once the part is there, by one thread alone; it may call the part.

    Raises:
        NativeUnavailable: see `build`.
    """
    with _lock:
        key = isa, namespace, bits
        if key in _provided:
            return
        build_part(bits, isa, namespace)
        _provided.add(key)  # first, as `then` may call kernels
        then()


def check_provided(build: Build, bits: int) -> None:
    """Raises NativeUnavailable if a library that is not built here comes without a part."""
    if not path_of_part(build.library, bits).exists():
        raise NativeUnavailable(
            f"expected kernels of {bits}-bit caches, got those of a bundle without any: start "
            "another process"
        )


def call_when_missing(build: Build, provide: Callable[[int], object]) -> None:
    """Sets what an op calls with a key of `PARTS` that a cache needs first."""

    def provided(bits: int) -> int:
        try:
            provide(bits)
        except Exception as error:
            _log.error("there are no kernels of %d-bit caches: %s", bits, error)
            return 0
        return 1

    callback = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int32)(provided)
    _callbacks.append(callback)
    getattr(ctypes.CDLL(str(build.library)), _SET_BUILDER)(callback)
