// Floats of 8 bits as bfloat16, by tables that fit into registers.
#pragma once

#include "bfloat16_dot.h"

#if CA_HAS_BFLOAT16_DOT && defined(__AVX512VBMI__)
#define CA_HAS_CODE_TABLES 1

namespace compiled_attn {

// 64 codes of 8 bits.
typedef __m512i Codes;

CA_INLINE Codes codes_at(const void* at) { return _mm512_loadu_si512(at); }

// Element i of a beside element i of b: low holds 0-7 of each sixteen, high 8-15.
CA_INLINE void zip_codes(Codes a, Codes b, Codes& low, Codes& high) {
  low = _mm512_unpacklo_epi8(a, b);
  high = _mm512_unpackhi_epi8(a, b);
}

// Codes of floats as bfloat16, which holds each of them exactly: the bytes of 128 magnitudes, which
// are the lower 7 bits of a code, in two tables.
template <class Element>
class CodeTables {
 public:
  CodeTables() {
    for (int code = 0; code < 128; ++code) {
      Element element;
      std::memcpy(&element, &code, 1);
      const uint32_t bits = float_bits(value_of(element)) >> 16;
      reinterpret_cast<uint8_t*>(low_)[code] = uint8_t(bits);
      reinterpret_cast<uint8_t*>(high_)[code] = uint8_t(bits >> 8);
    }
  }

  // Elements 0-7 and 8-15 of each 16.
  CA_INLINE void look_up(Codes codes, Pairs& first, Pairs& second) const {
    const Codes low = _mm512_permutex2var_epi8(low_[0], codes, low_[1]);
    Codes high = _mm512_permutex2var_epi8(high_[0], codes, high_[1]);
    const Codes sign = _mm512_set1_epi8(-128);
    high = _mm512_ternarylogic_epi32(high, codes, sign, 0xf8);  // high | (codes & sign)
    first = _mm512_unpacklo_epi8(low, high);
    second = _mm512_unpackhi_epi8(low, high);
  }

 private:
  Codes low_[2], high_[2];
};

}  // namespace compiled_attn

#else
#define CA_HAS_CODE_TABLES 0
#endif
