"""Lets inductor trust the processor's flags for vector instructions.

Otherwise the first kernel of a process builds and runs a program for each instruction set, with
torch's headers, which takes seconds. Small extensions (VNNI, AMX) are still probed; before torch
2.13 each of these programs imports torch, so they are only built.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from graphs.torch_internals.features import Feature, Patch, SharedPatch

__all__ = ["TRUSTED_VECTORS", "trust_vectors"]

_SETTING = "cpp.vec_isa_ok"
_PROGRAM = "_avx_py_load"  # loads the library of a probe


def trust_vectors() -> AbstractContextManager[object]:
    """Let inductor take the processor's best instruction set without probing it."""
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
