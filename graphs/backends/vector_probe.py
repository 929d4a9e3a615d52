"""Inductor's probes of vector instructions, each a program that it builds and starts."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import torch

__all__ = ["one_probe", "without_probes"]

# What is replaced is torch's own, so that two warmups at once must not both put it back.
_ONE_AT_A_TIME = threading.RLock()
_PROGRAM = 'extern "C" void probe() {}\n'


@contextlib.contextmanager
def one_probe(options: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Let the first compile of a process probe the best instructions that work, and no others.

    Inductor takes the best, but first builds programs for all of them, each with torch's headers,
    for seconds. Here they are without: the first kernel is compiled with them anyway. `options` of
    inductor that ask for a width of vectors find all of them probed.
    """
    from torch._inductor import cpu_vec_isa

    if _is_probed() or not hasattr(cpu_vec_isa, "VecISA"):
        yield
        return
    with (
        _ONE_AT_A_TIME,
        _best_only(),
        patch.object(cpu_vec_isa.VecISA, "_avx_code", _PROGRAM, create=True),
    ):
        yield


@contextlib.contextmanager
def without_probes() -> Iterator[None]:
    """Load a graph that was compiled on a processor like this one, and take its word for it."""
    from torch._inductor import config, cpu_vec_isa

    if _is_probed():
        yield
        return
    try:
        with _ONE_AT_A_TIME, _best_only(), config.patch({"cpp.vec_isa_ok": True}):
            yield
    finally:
        cpu_vec_isa.valid_vec_isa_list.cache_clear()


@contextlib.contextmanager
def _best_only() -> Iterator[None]:
    from torch._inductor import config, cpu_vec_isa

    names = "supported_vec_isa_list", "x86_isa_checker"
    takes_best = config.cpp.simdlen is None and torch.backends.cpu.get_cpu_capability() == "AVX512"
    if not takes_best or not all(hasattr(cpu_vec_isa, name) for name in names):
        yield
        return
    every: Any = cpu_vec_isa.supported_vec_isa_list
    best: Any = _UpToBest(every, cpu_vec_isa.x86_isa_checker())
    with patch.object(cpu_vec_isa, "supported_vec_isa_list", best):
        yield


def _is_probed() -> bool:
    """Whether the probes are made, or this torch keeps their results elsewhere."""
    from torch._inductor import cpu_vec_isa

    found: Any = getattr(cpu_vec_isa, "valid_vec_isa_list", None)
    return not hasattr(found, "cache_clear") or bool(found.cache_info().currsize)


class _UpToBest(list[Any]):
    """Instruction sets, best first, until one works; a set is true where its probe succeeds."""

    def __init__(self, every: Sequence[Any], processor: Sequence[str]) -> None:
        super().__init__(every)
        self._processor = processor

    def __iter__(self) -> Iterator[Any]:
        for each in super().__iter__():
            yield each
            if all(flag in self._processor for flag in str(each).split()) and each:
                return
