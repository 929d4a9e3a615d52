// Products of pairs of bfloat16, where the processor has them.
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
#endif
