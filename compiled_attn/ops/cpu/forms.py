"""Forms of the kernels: other speeds, the same results but for rounding; the fastest is taken.

An instruction set does not tell which that is. Dot products of bfloat16 have the rate of float32's
on an AMD and half of it on an Intel, and prefetches into the first level cache that help one
processor slow another.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from compiled_attn.ops.cpu.isa import ISAS
from compiled_attn.ops.cpu.libraries import forms_of
from graphs.files import write_whole

__all__ = [
    "AHEAD_KIB",
    "CACHES",
    "Chosen",
    "Forms",
    "keep",
    "kept",
    "products_of",
    "products_of_halves",
    "take",
]

CACHES = ("L2", "L1")
"""Where keys, values and weights can be asked to come to."""
AHEAD_KIB = (32, 16, 64, 128)

_PRODUCTS = ("tiles", "pairs", "floats")  # numbered as `Products` of csrc/abi.h
_NEEDS = {"tiles": "amx_bf16", "pairs": "avx512_bf16"}


def products_of(isa: str) -> Sequence[str]:
    """Ways to multiply bfloat16 that an instruction set has, the best guess first.

    "tiles" of AMX, "pairs" by the dot products of AVX-512, "floats" as float32.
    """
    has = ISAS[isa]
    return [each for each in _PRODUCTS if each not in _NEEDS or _NEEDS[each] in has]


def products_of_halves(isa: str) -> Sequence[str]:
    """Ways to multiply float32 with weights that bfloat16 holds, the best guess first.

    "tiles" takes three products, as three bfloat16 add up to a float; by dot products of pairs
    three would take longer than "floats" does. They differ by rounding, but for inputs below
    2^-102, of which "tiles" loses low bits, and infinite weights, which give NaN there.
    """
    return ["floats", *(each for each in products_of(isa) if each == "tiles")]


@dataclass(frozen=True)
class Forms:
    """How the kernels multiply bfloat16 and ask for memory.

    Attributes:
        few_rows, many_rows: products of attention, see `products_of`; few rows have no tiles.
        linear: products of linear layers of packed weights.
        asks: of `CACHES`, for keys and values.
        ahead_kib: KiB between those that are read and those that are asked for.
        linear_asks, linear_asks_once: of `CACHES`, for weights of linear layers that are multiplied
            with block after block of rows, or with one; those of tiles come to the second one, as
            those of int8 do.
        linear_halves: products of linear layers of float32 in halves, see `products_of_halves`.
    """

    few_rows: str
    many_rows: str
    linear: str
    asks: str = CACHES[0]
    ahead_kib: int = AHEAD_KIB[0]
    linear_asks: str = "L1"
    linear_asks_once: str = "L1"
    linear_halves: str = "floats"

    @classmethod
    def of(cls, isa: str) -> Forms:
        """The best guess for an instruction set, which is what its library begins with."""
        best, *_ = products = products_of(isa)
        few = next(each for each in products if each != "tiles")
        return cls(few, best, best)

    def serves(self, isa: str) -> bool:
        """Whether an instruction set has all of them."""
        has = products_of(isa)
        few, *others = self.few_rows, self.many_rows, self.linear
        caches = {self.asks, self.linear_asks, self.linear_asks_once}
        known = caches <= {*CACHES} and self.ahead_kib in AHEAD_KIB
        halves = self.linear_halves in products_of_halves(isa)
        are_there = few in has and few != "tiles" and all(each in has for each in others)
        return known and halves and are_there

    def __str__(self) -> str:
        return (
            f"few rows {self.few_rows}, many {self.many_rows}, linear {self.linear}, "
            f"halves {self.linear_halves}, {self.ahead_kib} KiB ahead to {self.asks}, "
            f"weights to {self.linear_asks}, of one block {self.linear_asks_once}"
        )


@dataclass(frozen=True)
class Chosen:
    """The forms that are taken.

    Attributes:
        forms: the fastest that was measured, or the best guess.
        ratios: how many times as fast as the best guess others were, by what differs.
    """

    forms: Forms
    ratios: Mapping[str, float] = field(default_factory=dict)


class _Forms(ctypes.Structure):
    """`Forms` of csrc/abi.h."""

    _fields_ = (
        ("few_rows", ctypes.c_int32),
        ("many_rows", ctypes.c_int32),
        ("linear", ctypes.c_int32),
        ("asks_near", ctypes.c_int32),
        ("ahead_bytes", ctypes.c_int64),
        ("linear_near", ctypes.c_int32),
        ("linear_near_once", ctypes.c_int32),
        ("linear_halves", ctypes.c_int32),
    )


def take(library: Path, forms: Forms) -> None:
    """Lets the kernels of a loaded library work so from now on, in all threads."""
    products = forms.few_rows, forms.many_rows, forms.linear
    chosen = _Forms(
        *map(_PRODUCTS.index, products),
        CACHES.index(forms.asks),
        forms.ahead_kib * 1024,
        CACHES.index(forms.linear_asks),
        CACHES.index(forms.linear_asks_once),
        _PRODUCTS.index(forms.linear_halves),
    )
    ctypes.CDLL(str(library)).compiled_attn_set_forms(ctypes.byref(chosen))


def kept(library: Path, isa: str) -> Chosen | None:
    """What is kept beside a library; None: nothing that its instruction set has."""
    try:
        known = json.loads(forms_of(library).read_text())
        ratios = {str(name): float(ratio) for name, ratio in known["ratios"].items()}
        forms = Forms(**known["forms"])
    except (OSError, ValueError, AttributeError, TypeError, KeyError):
        return None
    return Chosen(forms, ratios) if forms.serves(isa) else None


def keep(library: Path, chosen: Chosen) -> None:
    """Writes it beside a library; raises OSError where that cannot be."""
    write_whole(forms_of(library), json.dumps(asdict(chosen), indent=1).encode())
