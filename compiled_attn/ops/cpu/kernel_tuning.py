"""Kernel settings whose best value the instruction set does not determine.

All give the same results but for rounding. Dot products of bfloat16 run at the rate of float32 on
AMD and at half of it on Intel; prefetching into L1 helps one processor and slows another.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from compiled_attn.ops.cpu.isa import ISAS
from compiled_attn.ops.cpu.libraries import kernel_tuning_file
from graphs.files import write_whole

__all__ = [
    "CACHES", "PREFETCH_KIB", "KernelTuning", "TuningResult", "apply", "bf16_weight_dot_kinds",
    "dot_kinds", "read", "write",
]  # fmt: skip

CACHES = ("L2", "L1")
"""Where keys, values and weights can be prefetched to."""
PREFETCH_KIB = (32, 16, 64, 128)

_DOT_KINDS = ("amx", "bf16-dot", "float32")  # numbered as `DotKind` of csrc/abi.h
_NEEDS = {"amx": "amx_bf16", "bf16-dot": "avx512_bf16"}


def dot_kinds(isa: str) -> Sequence[str]:
    """Ways to multiply bfloat16 that an instruction set has, the best guess first."""
    has = ISAS[isa]
    return [each for each in _DOT_KINDS if each not in _NEEDS or _NEEDS[each] in has]


def bf16_weight_dot_kinds(isa: str) -> Sequence[str]:
    """Ways to multiply float32 inputs with bfloat16 weights, the best guess first.

    "amx" splits each input into three bfloat16; with "bf16-dot" three products would be slower than
    "float32". "amx" loses low bits of inputs below 2^-102, and gives NaN for infinite weights.
    """
    return ["float32", *(each for each in dot_kinds(isa) if each == "amx")]


@dataclass(frozen=True)
class KernelTuning:
    """How the kernels multiply bfloat16 and prefetch.

    Attributes:
        decode, prefill: dot products of attention, see `dot_kinds`; decode has no "amx".
        linear: dot products of packed linear layers.
        prefetch: cache of `CACHES` that keys and values are prefetched to.
        prefetch_kib: prefetch distance in KiB.
        linear_prefetch, linear_prefetch_once: the cache for weights read once per block of rows, or
            once only. AMX and quantised weights always use L2.
        linear_bf16_weights: dot products of float32 inputs with bfloat16 weights, see
            `bf16_weight_dot_kinds`.
    """

    decode: str
    prefill: str
    linear: str
    prefetch: str = CACHES[0]
    prefetch_kib: int = PREFETCH_KIB[0]
    linear_prefetch: str = "L1"
    linear_prefetch_once: str = "L1"
    linear_bf16_weights: str = "float32"

    @classmethod
    def default(cls, isa: str) -> KernelTuning:
        """The best guess for an instruction set, which its library starts with."""
        best, *_ = kinds = dot_kinds(isa)
        return cls(next(each for each in kinds if each != "amx"), best, best)

    def fits(self, isa: str) -> bool:
        """Whether an instruction set supports these settings."""
        has = dot_kinds(isa)
        caches = {self.prefetch, self.linear_prefetch, self.linear_prefetch_once}
        return (
            self.decode in has
            and self.decode != "amx"
            and {self.prefill, self.linear} <= {*has}
            and caches <= {*CACHES}
            and self.prefetch_kib in PREFETCH_KIB
            and self.linear_bf16_weights in bf16_weight_dot_kinds(isa)
        )

    def __str__(self) -> str:
        return (
            f"decode {self.decode}, prefill {self.prefill}, linear {self.linear}, "
            f"bfloat16 weights {self.linear_bf16_weights}, "
            f"prefetch {self.prefetch_kib} KiB ahead to {self.prefetch}, "
            f"weights to {self.linear_prefetch}, of one block {self.linear_prefetch_once}"
        )


@dataclass(frozen=True)
class TuningResult:
    """The settings in use.

    Attributes:
        tuning: the fastest that were measured, or the best guess.
        ratios: speed of the others relative to the best guess, by what differs.
    """

    tuning: KernelTuning
    ratios: Mapping[str, float] = field(default_factory=dict)


class _KernelTuning(ctypes.Structure):
    """`KernelTuning` of csrc/abi.h."""

    _fields_ = (
        ("decode", ctypes.c_int32), ("prefill", ctypes.c_int32), ("linear", ctypes.c_int32),
        ("prefetch_l1", ctypes.c_int32), ("prefetch_bytes", ctypes.c_int64),
        ("linear_prefetch_l1", ctypes.c_int32), ("linear_prefetch_l1_once", ctypes.c_int32),
        ("linear_bf16_weights", ctypes.c_int32),
    )  # fmt: skip


def apply(library: Path, tuning: KernelTuning) -> None:
    """Sets the tuning of a loaded library, for all threads."""
    kinds = tuning.decode, tuning.prefill, tuning.linear
    native = _KernelTuning(
        *map(_DOT_KINDS.index, kinds),
        CACHES.index(tuning.prefetch),
        tuning.prefetch_kib * 1024,
        CACHES.index(tuning.linear_prefetch),
        CACHES.index(tuning.linear_prefetch_once),
        _DOT_KINDS.index(tuning.linear_bf16_weights),
    )
    ctypes.CDLL(str(library)).compiled_attn_set_tuning(ctypes.byref(native))


def read(library: Path, isa: str) -> TuningResult | None:
    """Reads the tuning saved next to a library; None if there is none that fits."""
    try:
        known = json.loads(kernel_tuning_file(library).read_text())
        ratios = {str(name): float(ratio) for name, ratio in known["ratios"].items()}
        tuning = KernelTuning(**known["tuning"])
    except (OSError, ValueError, AttributeError, TypeError, KeyError):
        return None
    return TuningResult(tuning, ratios) if tuning.fits(isa) else None


def write(library: Path, result: TuningResult) -> None:
    """Saves a result next to a library; raises OSError if that is impossible."""
    write_whole(kernel_tuning_file(library), json.dumps(asdict(result), indent=1).encode())
