"""Instruction sets that the kernels are compiled for."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch

from compiled_attn.errors import NativeUnavailable

__all__ = ["ISAS", "available_isas", "flags_of", "isas_of_machine", "request_permission"]

_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl")
_AVX512_BF16 = ("avx512_bf16", "avx512vbmi", "avx512_vnni")
_AVX2 = ("avx2", "fma", "f16c")

ISAS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "amx_bf16": (*_AVX512, *_AVX2, *_AVX512_BF16, "amx_tile", "amx_bf16", "amx_int8"),
        "avx512_bf16": (*_AVX512, *_AVX2, *_AVX512_BF16),
        "avx512": (*_AVX512, *_AVX2),
        "avx2": _AVX2,
        "neon": ("asimd",),
        "portable": (),
    }
)
"""Instruction sets, best first, and the processor features that each needs."""

# arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILE_DATA) of Linux, 5.16 or newer.
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18

_X86 = ("x86_64", "AMD64", "amd64")
_ARM = ("aarch64", "arm64")


def available_isas(cpuinfo: Path = Path("/proc/cpuinfo"), machine: str | None = None) -> list[str]:
    """Returns the instruction sets of this processor, best first; "portable" is always last."""
    has = _features(cpuinfo, machine or platform.machine())
    return [isa for isa, needs in ISAS.items() if has.issuperset(needs)]


def isas_of_machine(machine: str | None = None) -> list[str]:
    """Returns the instruction sets of an architecture; None: this machine's."""
    machine = machine or platform.machine()
    own = {"neon"} if machine in _ARM else {*ISAS} - {"neon"} if machine in _X86 else set()
    return [isa for isa in ISAS if isa in own | {"portable"}]


def request_permission(isa: str) -> None:
    """Requests the AMX tile registers for the process, if an instruction set uses them.

    Raises:
        NativeUnavailable: the system refuses; tile instructions would raise SIGILL.
    """
    if "amx_tile" not in ISAS.get(isa, ()):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (ctypes.c_long(each) for each in (_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA))
    if libc.syscall(*arguments):
        raise NativeUnavailable(
            "expected Linux to permit the tile registers of this processor (AMX), got "
            f"{os.strerror(ctypes.get_errno())}: use Linux 5.16 or newer, and no thread with an "
            "alternate signal stack of less than 16 KiB"
        )


def flags_of(isa: str) -> list[str]:
    """Returns the compiler flags of an instruction set.

    Raises:
        ValueError: unknown instruction set.
    """
    if isa not in ISAS:
        raise ValueError(f"expected an instruction set of {[*ISAS]}, got {isa!r}: choose one")
    if isa == "neon":
        return []  # part of every 64-bit ARM
    return [f"-m{_flag_name(feature)}" for feature in ISAS[isa]]


def _flag_name(feature: str) -> str:
    return feature.replace("_", "-" if feature.startswith("amx") else "")


def _features(cpuinfo: Path, machine: str) -> set[str]:
    if machine in _ARM:
        return {"asimd"}
    if machine not in _X86:
        return set()
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return _features_by_torch()
    return set(next((line for line in lines if line.startswith("flags")), "").split())


def _features_by_torch() -> set[str]:
    has = torch.backends.cpu.get_cpu_capability()
    return set({"AVX512": (*_AVX512, *_AVX2), "AVX2": _AVX2}.get(has, ()))
