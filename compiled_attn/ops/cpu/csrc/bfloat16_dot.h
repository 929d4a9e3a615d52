// Products of pairs of bfloat16, where the processor has them, and vectors rounded to it.
#pragma once

#include <algorithm>

#include "elements.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define CA_HAS_BFLOAT16_DOT 1

namespace compiled_attn {

typedef __m512i Pairs;

CA_INLINE Pairs pairs_at(const BFloat16* at) { return _mm512_loadu_si512(at); }

// The pair at an address in every lane.
CA_INLINE Pairs same_pair(const BFloat16* at) {
  int32_t pair;
  std::memcpy(&pair, at, sizeof pair);
  return _mm512_set1_epi32(pair);
}

CA_INLINE Floats add_products(Floats sum, Pairs a, Pairs b) {
  return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}

// Element i of a beside element i of b, quarter by quarter: low holds elements 0-3 of each eight,
// high 4-7.
CA_INLINE void zip(Pairs a, Pairs b, Pairs& low, Pairs& high) {
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
#define CA_HAS_BFLOAT16_DOT 0

namespace compiled_attn {

// As `from_float` rounds.
CA_INLINE void store(BFloat16* at, Floats v) {
  typedef uint32_t Unsigned __attribute__((vector_size(sizeof(Floats))));
  const auto bits = bits_as<Unsigned>(v);
  const auto rounded = bits_as<Floats>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  const Floats upper = either(v == v, rounded, bits_as<Floats>(all(0x7fc0)));
  const Words halves = __builtin_convertvector(bits_as<Ints>(upper), Words);
  std::memcpy(static_cast<void*>(at), &halves, sizeof halves);
}

CA_INLINE void store(BFloat16* at, Floats first, Floats second) {
  store(at, first), store(at + kLanes, second);
}

}  // namespace compiled_attn

#endif
