// Two vectors of floats as one of pairs of bfloat16.
#pragma once

#include "bfloat16_dot.h"
#include "elements.h"

namespace compiled_attn {

// Pairs of bfloat16: a rounded to nearest in the lower half, b in the upper one.
CA_INLINE Ints joined_pairs(Floats a, Floats b) {
#if CA_HAS_BFLOAT16_DOT
  alignas(64) static constexpr auto order = [] {
    struct { uint16_t of[32]; } all{};
    for (int i = 0; i < 32; ++i) all.of[i] = uint16_t(i / 2 + i % 2 * 16);
    return all;
  }();
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(b, a);
  return (Ints)_mm512_permutexvar_epi16(_mm512_load_si512(&order), both);
#else
  const auto rounded = [](Floats x) {
    const Ints bits = bits_as<Ints>(x);
    return either(x == x, bits_as<Floats>(bits + 0x7fff + (bits >> 16 & 1)), all(NAN));
  };
  const Ints high = bits_as<Ints>(rounded(b)) & all(int32_t(0xffff0000));
  return high | (bits_as<Ints>(rounded(a)) >> 16 & 0xffff);
#endif
}

}  // namespace compiled_attn
