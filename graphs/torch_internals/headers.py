"""Compiles the headers of inductor's C++ kernels concurrently with the first trace.

Inductor precompiles torch's vector headers once per machine, and probes small vector extensions
(VNNI, AMX) once per cache. Otherwise the first kernel waits for both while a processor idles.
"""

from __future__ import annotations

import importlib
import threading
from contextlib import suppress
from typing import Any

from graphs.torch_internals.features import Feature, describe
from graphs.torch_internals.vectors import trust_vectors

__all__ = ["HEADERS_AHEAD", "compile_headers", "wait_for_probes"]

# Flags of the headers are those of kernels with vectors.
_KERNEL = """
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C" void kernel(float* out) { at::vec::Vectorized<float>(0.0f).store(out); }
"""
# Loaded before the thread starts: modules of torch import each other in circles, which two threads
# may not do at once.
_MODULES = (
    "torch._inductor.async_compile", "torch._inductor.codecache", "torch._inductor.cpp_builder",
    "torch._inductor.cpu_vec_isa", "torch.utils._filelock",
)  # fmt: skip

_lock = threading.Lock()
_started: list[_Headers] = []  # at most one


class _Headers:
    """Attributes: probed: set once the probes have ended."""

    def __init__(self) -> None:
        self.probed = threading.Event()
        self.thread = threading.Thread(target=self._compile, name="headers", daemon=True)

    def _compile(self) -> None:
        try:
            with trust_vectors():
                _probe_vectors()
                self.probed.set()
                _precompile()
        except Exception as error:
            HEADERS_AHEAD.switch_off(describe(error))
        finally:
            self.probed.set()


def compile_headers() -> None:
    """Start to compile them in a thread, once per process.

    Nothing depends on it: a kernel that needs them waits for the lock of their file, or makes them.
    """
    with _lock:
        if _started or not HEADERS_AHEAD.is_on:
            return
        for name in _MODULES:
            with suppress(ImportError):  # in other versions of torch
                importlib.import_module(name)
        _started.append(_Headers())
        _started[0].thread.start()


def wait_for_probes() -> None:
    """Wait until no thread probes: inductor changes its compiler flags meanwhile."""
    for each in _started:
        each.probed.wait()


def _probe_vectors() -> None:
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    pick_vec_isa()


def _precompile() -> None:
    from torch._inductor import config
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    settings: Any = config
    if settings.cpp_cache_precompile_headers:
        # Compiles the kernel only when its result is called, but the headers now.
        CppPythonBindingsCodeCache.load_pybinding_async(["float*"], _KERNEL)


def _probe() -> str:
    from torch._inductor import config
    from torch._inductor.codecache import CppPythonBindingsCodeCache as Cache

    if not hasattr(config, "cpp_cache_precompile_headers"):
        return "inductor has no setting cpp_cache_precompile_headers"
    return "" if hasattr(Cache, "load_pybinding_async") else "inductor loads kernels otherwise"


HEADERS_AHEAD = Feature(
    "headers_ahead",
    gain="Compiles headers concurrently with the first trace: seconds of a cold start.",
    fallback="The first kernel waits for the headers.",
    versions="2.11 to 2.15",
    files=("graphs/torch_internals/headers.py",),
    probe=_probe,
)
