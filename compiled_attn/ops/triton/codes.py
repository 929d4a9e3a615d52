"""Decodes and encodes 8-bit caches, exactly on all devices.

Triton converts fp8 from sm_89 on; elsewhere, and for encoding everywhere, integer arithmetic does.
"""

import triton
import triton.language as tl

_BIG = tl.constexpr(12582912.0)  # 1.5 * 2 ** 23: adding it rounds a float32 to a whole number


@triton.jit
def decode(stored, CODES: tl.constexpr, DTYPE: tl.constexpr, HAS_FP8: tl.constexpr):
    """Decodes stored elements to a dtype, without scale; HAS_FP8: the device converts e4m3."""
    if CODES == "e4m3" and HAS_FP8:
        numbers = stored.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(DTYPE)
    elif CODES == "e4m3":
        bits = stored.to(tl.uint16)
        half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        number = half.to(tl.float32) * 256.0  # the bias of float16 is 8 more
        numbers = tl.where((bits & 0x7F) == 0x7F, float("nan"), number).to(DTYPE)
    elif CODES == "e5m2":
        numbers = (stored.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(DTYPE)
    elif CODES == "int8":
        numbers = stored.to(tl.float32).to(DTYPE)
    else:
        numbers = stored
    return numbers


@triton.jit
def encode(scaled, CODES: tl.constexpr):
    """Encodes scaled float32: rounds to even and saturates, bit-equal to
    `compiled_attn.cache.quantisation.encode`."""
    if CODES == "e4m3":
        codes = _float8(scaled, 3, 7, 448.0)
    elif CODES == "e5m2":
        codes = _float8(scaled, 2, 15, 57344.0)
    else:
        whole = (scaled + _BIG) - _BIG
        codes = tl.minimum(tl.maximum(whole, -127.0), 127.0).to(tl.int8)
    return codes


@triton.jit
def _float8(number, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr):
    bits = number.to(tl.uint32, bitcast=True)
    size = tl.minimum((bits & 0x7FFFFFFF).to(tl.float32, bitcast=True), LARGEST)
    DROPPED: tl.constexpr = 23 - MANTISSA
    own = size.to(tl.uint32, bitcast=True)
    half = ((1 << (DROPPED - 1)) - 1) + ((own >> DROPPED) & 1)
    normal = ((own + half) >> DROPPED) - ((127 - BIAS) << MANTISSA)
    # Below the smallest normal number codes count steps of one size.
    steps = size * (2.0 ** (BIAS + MANTISSA - 1))
    small = ((steps + _BIG) - _BIG).to(tl.uint32)
    codes = tl.where(size < 2.0 ** (1 - BIAS), small, normal)
    codes = tl.where(number != number, 0x7F, codes | ((bits >> 24) & 0x80))
    return codes.to(tl.uint8)
