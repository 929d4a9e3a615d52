"""Blocks of the GGUF formats that stay packed, as codes, scales and steps.

The layouts are those of llama.cpp, ggml-quants.h: https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["FORMATS", "Blocks", "Format"]

Bytes = NDArray[np.uint8]


class Blocks(NamedTuple):
    """Rows of a weight, see `compiled_attn.ops.quantised_linear.QuantisedWeight.pack`.

    Shape:
        - codes: ``[N, K]`` uint8
        - scales: ``[N, G]`` or ``[N, G, 2]`` float16
        - steps: ``[N, S]`` int8 or ``[N, S, 2]`` uint8, or None
    """

    codes: Bytes
    scales: NDArray[np.float16]
    steps: NDArray[Any] | None = None


class Format(NamedTuple):
    """A format: bits of a code, numbers and bytes of a block, and its parts ``[N, B, bytes]``."""

    bits: int
    numbers: int
    bytes: int
    parse: Callable[[Bytes], Blocks]


def _halves(blocks: Bytes, begin: int, end: int) -> NDArray[np.float16]:
    return np.ascontiguousarray(blocks[..., begin:end]).view("<f2")


def _nibbles(packed: Bytes) -> Bytes:
    """Low halves of all bytes, then high ones."""
    return np.concatenate((packed & 15, packed >> 4), -1)


def _upper(bits: Bytes) -> Bytes:
    """Bits from the fifth on."""
    return np.left_shift(bits, np.uint8(4))


def _rows(codes: Bytes) -> Bytes:
    return codes.reshape(len(codes), -1)


def _with_minimum(blocks: Bytes) -> NDArray[np.float16]:
    """``d`` and ``m`` of ``d * code + m``."""
    scales = _halves(blocks, 0, 4).copy()
    scales[..., 1] *= -1
    return scales


def _fifth_bits(blocks: Bytes, begin: int) -> Bytes:
    """Bits of 32 codes, as 16."""
    return _upper(np.unpackbits(blocks[..., begin : begin + 4], axis=-1, bitorder="little"))


def _q4_0(blocks: Bytes) -> Blocks:
    return Blocks(_rows(_nibbles(blocks[..., 2:])), _halves(blocks, 0, 2)[..., 0])


def _q4_1(blocks: Bytes) -> Blocks:
    return Blocks(_rows(_nibbles(blocks[..., 4:])), _with_minimum(blocks))


def _q5_0(blocks: Bytes) -> Blocks:
    codes = _nibbles(blocks[..., 6:]) | _fifth_bits(blocks, 2)
    return Blocks(_rows(codes), _halves(blocks, 0, 2)[..., 0])


def _q5_1(blocks: Bytes) -> Blocks:
    codes = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks, 4)
    return Blocks(_rows(codes), _with_minimum(blocks))


def _q8_0(blocks: Bytes) -> Blocks:
    return Blocks(
        _rows(np.bitwise_xor(blocks[..., 2:], np.uint8(128))), _halves(blocks, 0, 2)[..., 0]
    )


def _by_32(packed: Bytes) -> Bytes:
    """Codes of groups of 32: the low halves of 32 bytes, then their high halves."""
    return _nibbles(packed.reshape(*packed.shape[:2], 4, 32)).reshape(*packed.shape[:2], 8, 32)


def _six_bits(blocks: Bytes) -> Bytes:
    """Factors of scale and minimum of the eight groups of a block, ``[N, 8 * B, 2]``."""
    first, second, third = (blocks[..., 4 + 4 * i : 8 + 4 * i] for i in range(3))
    scale = np.concatenate((first & 63, third & 15 | first >> 2 & 48), -1)
    minimum = np.concatenate((second & 63, third >> 4 | second >> 2 & 48), -1)
    return np.stack((scale, minimum), -1).reshape(len(blocks), -1, 2)


def _q4_k(blocks: Bytes) -> Blocks:
    return Blocks(_rows(_by_32(blocks[..., 16:])), _halves(blocks, 0, 4), _six_bits(blocks))


def _q5_k(blocks: Bytes) -> Blocks:
    more = np.stack([blocks[..., 16:48] >> group & 1 for group in range(8)], -2)
    codes = _by_32(blocks[..., 48:]) | _upper(more)
    return Blocks(_rows(codes), _halves(blocks, 0, 4), _six_bits(blocks))


def _q6_k(blocks: Bytes) -> Blocks:
    low, more = blocks[..., :128].reshape(*blocks.shape[:2], 2, 64), blocks[..., 128:192]
    of_half = more.reshape(*blocks.shape[:2], 2, 32)
    high = np.concatenate([of_half >> shift & 3 for shift in (0, 2, 4, 6)], -1)
    steps = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8)
    codes = _nibbles(low) | _upper(high)
    return Blocks(_rows(codes), _halves(blocks, 208, 210)[..., 0], steps.reshape(len(blocks), -1))


FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        "Q4_0": Format(4, 32, 18, _q4_0),
        "Q4_1": Format(4, 32, 20, _q4_1),
        "Q5_0": Format(5, 32, 22, _q5_0),
        "Q5_1": Format(5, 32, 24, _q5_1),
        "Q8_0": Format(8, 32, 34, _q8_0),
        "Q4_K": Format(4, 256, 144, _q4_k),
        "Q5_K": Format(5, 256, 176, _q5_k),
        "Q6_K": Format(6, 256, 210, _q6_k),
    }
)
"""Formats by their name in GGUF files."""
