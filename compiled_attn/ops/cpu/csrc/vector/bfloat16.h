// Vectors of bfloat16: dot products where the processor has them (AVX512_BF16), and rounding.
#pragma once

#include <algorithm>

#include "vector/elements.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define CA_HAS_BF16_DOT 1

namespace compiled_attn {

typedef __m512i BFloat16x2;  // 16 pairs

CA_INLINE BFloat16x2 load_bf16x2(const BFloat16* at) { return _mm512_loadu_si512(at); }

CA_INLINE BFloat16x2 broadcast_bf16x2(const BFloat16* at) {
  int32_t pair;
  std::memcpy(&pair, at, sizeof pair);
  return _mm512_set1_epi32(pair);
}

CA_INLINE Floats dot_bf16(Floats sum, BFloat16x2 a, BFloat16x2 b) {
  return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}

// Interleaves a and b: low holds elements 0-3 of each eight, high 4-7.
CA_INLINE void zip(BFloat16x2 a, BFloat16x2 b, BFloat16x2& low, BFloat16x2& high) {
  low = _mm512_unpacklo_epi16(a, b);
  high = _mm512_unpackhi_epi16(a, b);
}

CA_INLINE void store(BFloat16* at, Floats v) {
  const __m256bh half = _mm512_cvtneps_pbh(v);
  std::memcpy(at, &half, sizeof half);
}

CA_INLINE void store(BFloat16* at, Floats first, Floats second) {
  const __m512bh both = _mm512_cvtne2ps_pbh(second, first);
  std::memcpy(at, &both, sizeof both);
}

}  // namespace compiled_attn

#else
#define CA_HAS_BF16_DOT 0

namespace compiled_attn {

// Rounds as `from_float` does.
CA_INLINE void store(BFloat16* at, Floats v) {
  typedef uint32_t Unsigned __attribute__((vector_size(sizeof(Floats))));
  const auto bits = bit_cast<Unsigned>(v);
  const auto rounded = bit_cast<Floats>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  const Floats upper = select(v == v, rounded, bit_cast<Floats>(splat(0x7fc0)));
  const U16s narrow = __builtin_convertvector(bit_cast<Ints>(upper), U16s);
  std::memcpy(static_cast<void*>(at), &narrow, sizeof narrow);
}

CA_INLINE void store(BFloat16* at, Floats first, Floats second) {
  store(at, first), store(at + kLanes, second);
}

}  // namespace compiled_attn

#endif

namespace compiled_attn {

// Rounds two vectors to pairs of bfloat16: a in the lower half, b in the upper.
CA_INLINE Ints round_to_pairs(Floats a, Floats b) {
#if CA_HAS_BF16_DOT
  alignas(64) static constexpr auto order = [] {
    struct { uint16_t of[32]; } all{};
    for (int i = 0; i < 32; ++i) all.of[i] = uint16_t(i / 2 + i % 2 * 16);
    return all;
  }();
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(b, a);
  return (Ints)_mm512_permutexvar_epi16(_mm512_load_si512(&order), both);
#else
  const auto rounded = [](Floats x) {
    const Ints bits = bit_cast<Ints>(x);
    return select(x == x, bit_cast<Floats>(bits + 0x7fff + (bits >> 16 & 1)), splat(NAN));
  };
  const Ints high = bit_cast<Ints>(rounded(b)) & splat(int32_t(0xffff0000));
  return high | (bit_cast<Ints>(rounded(a)) >> 16 & 0xffff);
#endif
}

}  // namespace compiled_attn
