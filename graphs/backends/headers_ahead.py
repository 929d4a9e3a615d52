"""The headers of inductor's C++ kernels, compiled while the first graph is traced.

Inductor compiles torch's vector headers once on a machine and keeps the result, which every later
kernel starts from. That takes as long as ten kernels, and so far the first graph waited for it,
with the other processor idle. Here a kernel that does next to nothing asks for them first.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

from torch import Tensor

from graphs.backends.vector_probe import one_probe
from graphs.capture.contract import Job

__all__ = ["headers_ahead", "wait_for_headers"]

_log = logging.getLogger(__name__)

# It has a vector in it, as the headers are compiled with the flags of such kernels.
_KERNEL = """
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C" void kernel(float* out) { at::vec::Vectorized<float>(0.0f).store(out); }
"""

_started: threading.Thread | None = None
_lock = threading.Lock()


def headers_ahead(job: Job) -> None:
    """Start to compile the headers beside this thread, at the first graph of a process on the CPU.

    Nothing depends on it: a kernel that comes before they are there waits for them or makes them,
    and what fails here fails there too.
    """
    global _started
    inputs = (value for value in job.examples if isinstance(value, Tensor))
    if any(value.device.type != "cpu" for value in inputs):
        return
    with _lock:
        if _started is None:
            _started = threading.Thread(target=_compile, name="inductor headers", daemon=True)
            _started.start()


def wait_for_headers() -> None:
    """Wait for them, if they are being made: before a fork, which threads do not survive."""
    if (started := _started) is not None:
        started.join()


def _compile() -> None:
    try:
        from torch._inductor import config
        from torch._inductor.codecache import CppPythonBindingsCodeCache

        asks: Any = config
        if getattr(asks, "cpp_cache_precompile_headers", False):
            with one_probe():
                CppPythonBindingsCodeCache.load_pybinding(["float*"], _KERNEL)
    except Exception as error:
        _log.debug("headers are not compiled ahead: %s", error)
