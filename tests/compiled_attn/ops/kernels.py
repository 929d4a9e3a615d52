"""The kernels that this machine can run, best first, and those of other devices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_attn.ops import NativeOps, NativeUnavailable, available_isas, load
from compiled_attn.ops.cpu import kernel_tuning
from compiled_attn.ops.cpu.build import find_compiler
from compiled_attn.ops.cpu.kernel_tuning import KernelTuning
from compiled_attn.ops.schema import schemas
from compiled_attn.ops.triton.register import register
from tests.fake_device import open_device
from tests.fake_device.moved import Memory

BEST, *OTHERS = available_isas()
SLOW = [pytest.param(isa, marks=pytest.mark.slow) for isa in OTHERS]
TRITON, CUDA, FAKE_DEVICE = "triton", "cuda", "fake_device"
ON_DEVICES = [
    pytest.param(TRITON, marks=pytest.mark.slow),
    pytest.param(CUDA, marks=pytest.mark.gpu),
]
"""Kernels that cannot check indices on the host: interpreted, and on the device."""
AMX = "amx_bf16"
WITHOUT_AMX = next(isa for isa in available_isas() if isa != AMX)


def loaded(isa: str | None, *, plain_tiles: bool = False) -> NativeOps:
    """The ops of a kernel, None: of the session; skips the test where it cannot be built.

    The best kernel is that of the session, which is built in any case.
    """
    if isa == BEST and not plain_tiles:
        isa = None
    if isa == TRITON:
        return interpreted()
    if isa == CUDA:
        return OnDevice("compiled_attn", "triton")
    if isa == FAKE_DEVICE:
        open_device()
        return OnFakeDevice("compiled_attn", "native")
    try:
        find_compiler()
    except NativeUnavailable as error:
        pytest.skip(str(error)) if isa != "reference" else None
    return load(isa, strict=isa is None, plain_tiles=plain_tiles)


@contextmanager
def tuned(ops: NativeOps, **changes: Any) -> Iterator[NativeOps]:
    """The kernels with changes to their tuning meanwhile."""
    library = ops.build.library
    before = _APPLIED.get(library, ops.tuning.tuning if ops.tuning else KernelTuning.default(AMX))
    _APPLIED[library] = replace(before, **changes)
    kernel_tuning.apply(library, _APPLIED[library])
    try:
        yield ops
    finally:
        _APPLIED[library] = before
        kernel_tuning.apply(library, before)


_APPLIED: dict[Path, KernelTuning] = {}


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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


class OnDevice(NativeOps):
    """The ops on a device, for CPU tensors: moves them there, and results and writes back."""

    device = "cuda"

    def paged_attention(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self._moved("paged_attention", args, kwargs)

    def paged_attention_(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self._moved("paged_attention_", args, kwargs)

    def _moved(self, name: str, args: Any, kwargs: Any) -> tuple[Tensor, Tensor]:
        load()
        memory = Memory(torch.device(self.device))
        moved, options = memory.moved((args, kwargs))
        out, lse = getattr(torch.ops.compiled_attn, name)(*moved, **options)
        memory.bring_back()
        return out.cpu(), lse.cpu()


class OnFakeDevice(OnDevice):
    """The kernel of the CPU on the fake device, by the same way."""

    device = FAKE_DEVICE
