"""Lets inductor skip the digest of the Triton package where no device would run its kernels.

Inductor reads all of Triton's files for the key of its cache, which has Triton only with a device.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from graphs.torch_internals.features import Feature, Patch, SharedPatch

__all__ = ["NO_TRITON_KEY", "skip_triton_key"]

_NAME = "triton_key"


def skip_triton_key() -> AbstractContextManager[object]:
    """Give inductor an empty digest of Triton while this process has no accelerator."""
    is_used = torch.accelerator.is_available() or not NO_TRITON_KEY.is_on
    return nullcontext() if is_used else _EMPTY


def _replacements() -> list[Patch]:
    from torch._inductor.runtime import triton_compat

    return [Patch(triton_compat, _NAME, lambda *_, **__: "")]


def _probe() -> str:
    from torch._inductor.runtime import triton_compat

    return "" if hasattr(triton_compat, _NAME) else f"inductor has no {_NAME}"


_EMPTY = SharedPatch(lambda: _replacements())
NO_TRITON_KEY = Feature(
    "no_triton_key",
    gain="Does not read the Triton package where there is no device for it: 4 s of a cold start.",
    fallback="The first compile reads it.",
    versions="2.11 to 2.15",
    files=("graphs/torch_internals/triton_key.py",),
    probe=_probe,
)
