"""Vector instructions: inductor is told to trust the processor's flags.

Without that its first kernel of a process builds and starts a program for each instruction set,
with torch's headers, which takes seconds.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from graphs.torch_internals.features import Feature

__all__ = ["TRUSTED_VECTORS", "trusted_vectors"]

_SETTING = "cpp.vec_isa_ok"


def trusted_vectors() -> AbstractContextManager[object]:
    """Within it, inductor takes the best instruction set that the processor names, unprobed."""
    if not TRUSTED_VECTORS.is_on:
        return nullcontext()
    from torch._inductor import config

    if config.cpp.vec_isa_ok is not None:  # the user's own choice
        return nullcontext()
    return _override(config)


def _override(config: Any) -> AbstractContextManager[object]:
    patched: AbstractContextManager[object] = config.patch({_SETTING: True})
    return patched


def _probe() -> str:
    from torch._inductor import config

    settings: Any = config.cpp
    return "" if hasattr(settings, "vec_isa_ok") else f"inductor has no setting {_SETTING}"


TRUSTED_VECTORS = Feature(
    "trusted_vectors",
    gain="Skips programs that probe vector instructions: seconds of a cold start.",
    fallback="The first kernel probes each instruction set.",
    versions="2.11 to 2.15",
    files=("graphs/torch_internals/vectors.py", "torch/_inductor/cpu_vec_isa.py"),
    probe=_probe,
)
