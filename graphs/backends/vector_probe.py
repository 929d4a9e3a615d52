"""Inductor's probes of vector instructions, each a program that it builds and starts."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any
from unittest.mock import patch

import torch

__all__ = ["one_probe", "probe", "probed", "without_probes"]

_PROGRAM = 'extern "C" void probe() {}\n'


@contextlib.contextmanager
def one_probe() -> Iterator[None]:
    """Within it, compiles probe the best instructions that work, and no others.

    Inductor takes the best, but first builds a program for each set, with torch's headers, which
    takes seconds. Here the programs go without the headers: the first kernel is compiled with them
    anyway. A compile that asks for a vector width still has every set probed, and so has any after
    it.
    """
    from torch._inductor import cpu_vec_isa

    if _is_probed() or not hasattr(cpu_vec_isa, "VecISA"):
        yield
        return
    with _BEST_ONLY:
        yield


def probe() -> None:
    """Probe the instructions now, as the first kernel would."""
    from torch._inductor import cpu_vec_isa

    with one_probe():
        cpu_vec_isa.pick_vec_isa()


def probed() -> list[str] | None:
    """The instruction sets that a compile here has found to work; None: none has looked."""
    from torch._inductor import config, cpu_vec_isa

    found: Any = getattr(cpu_vec_isa, "valid_vec_isa_list", None)
    if hasattr(found, "cache_info") and found.cache_info().currsize:
        return [*map(str, found())]
    if not _best.cache_info().currsize:
        return None
    return [*map(str, _best(tuple(cpu_vec_isa.supported_vec_isa_list), config.cpp.vec_isa_ok))]


@contextlib.contextmanager
def without_probes(known: Sequence[str] | None) -> Iterator[None]:
    """Load a graph that was compiled on a processor like this one, and trust what it found.

    Args:
        known: what :func:`probed` said there.
    """
    from torch._inductor import cpu_vec_isa

    every = getattr(cpu_vec_isa, "supported_vec_isa_list", ())
    sets = [each for name in known or () for each in every if str(each) == name]
    if known is None or len(sets) != len(known) or _is_probed():
        yield
        return
    before = _KNOWN.set(sets)
    try:
        with _BEST_ONLY:
            yield
    finally:
        _KNOWN.reset(before)


class _BestOnly:
    """Inductor's list of instruction sets replaced by the best one, while anybody is inside.

    Threads that warm up at once go in and out as they like: the last one puts the list back.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._undo.enter_context(_replaced())
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._undo.close()


_BEST_ONLY = _BestOnly()
_KNOWN: ContextVar[list[Any] | None] = ContextVar("instruction sets that work", default=None)
_PROBING = threading.RLock()


@contextlib.contextmanager
def _replaced() -> Iterator[None]:
    from torch._inductor import config, cpu_vec_isa

    names = "supported_vec_isa_list", "x86_isa_checker"
    if not all(hasattr(cpu_vec_isa, name) for name in names):
        yield
        return
    every: Any = cpu_vec_isa.valid_vec_isa_list
    is_best_taken = _is_best_taken()

    def best_only() -> list[Any]:
        if (known := _KNOWN.get()) is not None:
            return known
        if config.cpp.simdlen is not None or not is_best_taken:
            return every()  # type: ignore[no-any-return]
        with _PROBING:
            return [*_best(tuple(cpu_vec_isa.supported_vec_isa_list), config.cpp.vec_isa_ok)]

    best_only.cache_clear = every.cache_clear  # type: ignore[attr-defined]
    best_only.cache_info = every.cache_info  # type: ignore[attr-defined]
    with patch.object(cpu_vec_isa, "valid_vec_isa_list", best_only):
        yield


def _is_best_taken() -> bool:
    """Whether inductor takes the best set, as torch was not asked for a lesser one."""
    from torch._inductor import cpu_vec_isa

    taken = torch.backends.cpu.get_cpu_capability()
    has = [*map(str, _known(cpu_vec_isa.supported_vec_isa_list))]
    return taken == "AVX512" or has == [taken.lower()]


def _known(every: Sequence[Any]) -> list[Any]:
    """The sets that the processor has."""
    from torch._inductor import cpu_vec_isa

    flags: Any = cpu_vec_isa.x86_isa_checker()
    return [each for each in every if all(flag in flags for flag in str(each).split())]


@functools.cache
def _best(every: tuple[Any, ...], is_trusted: bool | None) -> tuple[Any, ...]:
    """The first set, best first, that works here; a set is true where its probe succeeds."""
    from torch._inductor import cpu_vec_isa

    with patch.object(cpu_vec_isa.VecISA, "_avx_code", _PROGRAM, create=True):
        return next(((each,) for each in _known(every) if each), ())


def _is_probed() -> bool:
    """Whether the probes are made, or this torch keeps their results elsewhere."""
    from torch._inductor import cpu_vec_isa

    found: Any = getattr(cpu_vec_isa, "valid_vec_isa_list", None)
    return not hasattr(found, "cache_clear") or bool(found.cache_info().currsize)
