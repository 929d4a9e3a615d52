"""Instruction sets that the kernels are compiled for, and which this processor has."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch

__all__ = ["ISAS", "available_isas", "best_isa", "flags_of"]

_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl")
_AVX2 = ("avx2", "fma", "f16c")

ISAS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "avx512_bf16": (*_AVX512, *_AVX2, "avx512_bf16", "avx512vbmi", "avx512_vnni"),
        "avx512": (*_AVX512, *_AVX2),
        "avx2": _AVX2,
        "neon": ("asimd",),
        "portable": (),
    }
)
"""Every instruction set, best first, and the processor's features that it needs."""

_X86 = ("x86_64", "AMD64", "amd64")
_ARM = ("aarch64", "arm64")


def available_isas(cpuinfo: Path = Path("/proc/cpuinfo"), machine: str | None = None) -> list[str]:
    """What this processor can run, best first; "portable" is always there."""
    has = _features(cpuinfo, machine or platform.machine())
    return [isa for isa, needs in ISAS.items() if has.issuperset(needs)]


def best_isa() -> str:
    """The first of `available_isas`."""
    return available_isas()[0]


def flags_of(isa: str) -> list[str]:
    """Compiler flags of an instruction set.

    Raises:
        ValueError: there is none of this name.
    """
    if isa not in ISAS:
        raise ValueError(f"expected an instruction set of {[*ISAS]}, got {isa!r}: choose one")
    if isa == "neon":
        return []  # part of every 64-bit ARM
    return [f"-m{feature.replace('_', '')}" for feature in ISAS[isa]]


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
