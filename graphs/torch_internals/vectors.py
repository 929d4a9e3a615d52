"""Vector instructions: inductor is told to trust the processor's flags.

Without that its first kernel of a process builds and starts a program for each instruction set,
with torch's headers, which takes seconds. The small extensions (VNNI, AMX) are probed all the same;
before torch 2.13 each of those programs imports torch, in every process, so they are built only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from graphs.torch_internals.features import Feature
from graphs.torch_internals.patches import Patch, SharedPatch

__all__ = ["TRUSTED_VECTORS", "trusted_vectors"]

_SETTING = "cpp.vec_isa_ok"
_PROGRAM = "_avx_py_load"  # what loads the library that a probe has built


def trusted_vectors() -> AbstractContextManager[object]:
    """Within it, inductor takes the best instruction set that the processor names, unprobed."""
    if not TRUSTED_VECTORS.is_on:
        return nullcontext()
    from torch._inductor import config

    if config.cpp.vec_isa_ok is not None:  # the user's own choice
        return nullcontext()
    return _override(config)


@contextmanager
def _override(config: Any) -> Iterator[None]:
    with config.patch({_SETTING: True}), _BUILT_ONLY:
        yield


def _replacements() -> list[Patch]:
    from torch._inductor.cpu_vec_isa import VecISA

    program = getattr(VecISA, _PROGRAM, "")
    return [Patch(VecISA, _PROGRAM, "")] if program.lstrip().startswith("import torch") else []


def _probe() -> str:
    from torch._inductor import config

    settings: Any = config.cpp
    return "" if hasattr(settings, "vec_isa_ok") else f"inductor has no setting {_SETTING}"


_BUILT_ONLY = SharedPatch(lambda: _replacements())
TRUSTED_VECTORS = Feature(
    "trusted_vectors",
    gain="Skips programs that probe vector instructions: seconds of a cold start.",
    fallback="The first kernel probes each instruction set.",
    versions="2.11 to 2.15",
    files=("graphs/torch_internals/vectors.py", "torch/_inductor/cpu_vec_isa.py"),
    probe=_probe,
)
