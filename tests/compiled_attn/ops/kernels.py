"""The kernels that this machine can run, the best one first; and those of other devices."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_attn.ops import NativeOps, NativeUnavailable, available_isas, load
from compiled_attn.ops.cpu.build import find_compiler
from compiled_attn.ops.schema import schemas
from compiled_attn.ops.triton.register import register

BEST, *OTHERS = available_isas()
SLOW = [pytest.param(isa, marks=pytest.mark.slow) for isa in OTHERS]
TRITON, CUDA = "triton", "cuda"
ON_DEVICES = [
    pytest.param(TRITON, marks=pytest.mark.slow),
    pytest.param(CUDA, marks=pytest.mark.gpu),
]
"""Kernels that cannot look at numbers before they run: interpreted, and on the device."""


def loaded(isa: str) -> NativeOps:
    if isa == TRITON:
        return interpreted()
    if isa == CUDA:
        return OnCuda("compiled_attn", "triton")
    try:
        find_compiler()
    except NativeUnavailable as error:
        pytest.skip(str(error)) if isa != "reference" else None
    return load(isa)


def interpreted() -> NativeOps:
    """The ops in Triton, for tensors of the CPU."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("Triton is not interpreted where there is a device")
    return _interpreted()


@cache
def _interpreted() -> NativeOps:
    namespace = "compiled_attn_interpreted"
    library = torch.library.Library(namespace, "FRAGMENT")
    for schema in schemas().values():
        library.define(schema)
    register(library, "CPU")
    _LIBRARIES.append(library)
    return NativeOps(namespace, "triton")


_LIBRARIES: list[torch.library.Library] = []


class OnCuda(NativeOps):
    """The ops on the device, for tensors of the CPU: moved there, and back what is written."""

    def paged_attention(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self._moved("paged_attention", args, kwargs)

    def paged_attention_(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self._moved("paged_attention_", args, kwargs)

    def _moved(self, name: str, args: Any, kwargs: Any) -> tuple[Tensor, Tensor]:
        load()
        moved = [_to_cuda(each) for each in args]
        options = {key: _to_cuda(each) for key, each in kwargs.items()}
        out, lse = getattr(torch.ops.compiled_attn, name)(*moved, **options)
        if name.endswith("_"):
            for here, there in zip(
                (*args, *kwargs.values()), (*moved, *options.values()), strict=True
            ):
                if isinstance(here, Tensor):
                    here.copy_(there)
        return out.cpu(), lse.cpu()


def _to_cuda(value: Any) -> Any:
    """A tensor on the device, with the strides that it has here."""
    if not isinstance(value, Tensor):
        return value
    size = sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True)) + 1
    there = torch.zeros(max(size, 0), dtype=value.dtype, device="cuda")
    return there.as_strided(value.shape, value.stride()).copy_(value)
