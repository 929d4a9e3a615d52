// Element types of queries and caches, and their conversion to and from float32.
#pragma once

#include <algorithm>
#include <cmath>

#include "abi.h"
#include "vector/simd.h"

namespace compiled_attn {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};
struct Float8E4M3 {
  uint8_t bits;
};
struct Float8E5M2 {
  uint8_t bits;
};

template <class Element>
constexpr bool is_quantised = sizeof(Element) == 1;

typedef uint16_t U16s __attribute__((vector_size(2 * kLanes), may_alias));
typedef int16_t I16s __attribute__((vector_size(2 * kLanes), may_alias));
typedef uint8_t U8s __attribute__((vector_size(kLanes), may_alias));
typedef int8_t I8s __attribute__((vector_size(kLanes), may_alias));

CA_INLINE Ints widen(U16s v) { return __builtin_convertvector(v, Ints); }

#if defined(__AVX512F__)
CA_INLINE Ints load_u8(const void* at) {
  return bit_cast<Ints>(_mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(at))));
}
CA_INLINE Ints load_i8(const void* at) {
  return bit_cast<Ints>(_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(at))));
}
#elif defined(__AVX2__)
CA_INLINE Ints load_u8(const void* at) {
  return bit_cast<Ints>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(at))));
}
CA_INLINE Ints load_i8(const void* at) {
  return bit_cast<Ints>(_mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(at))));
}
#else
CA_INLINE Ints load_u8(const void* at) {
  return __builtin_convertvector(load_as<U8s>(static_cast<const uint8_t*>(at)), Ints);
}
CA_INLINE Ints load_i8(const void* at) {
  return __builtin_convertvector(load_as<I8s>(static_cast<const uint8_t*>(at)), Ints);
}
#endif

#if defined(__AVX512F__)
CA_INLINE Floats from_float16(I16s v) { return _mm512_cvtph_ps((__m256i)v); }

// Loads 8-bit codes into the upper bytes of 16 bits.
CA_INLINE I16s load_u8_high(const void* at) {
  const __m128i codes = _mm_loadu_si128(static_cast<const __m128i*>(at));
  return (I16s)_mm256_slli_epi16(_mm256_cvtepu8_epi16(codes), 8);
}
#elif defined(__AVX2__)
CA_INLINE Floats from_float16(I16s v) { return _mm256_cvtph_ps((__m128i)v); }

CA_INLINE I16s load_u8_high(const void* at) {
  const __m128i codes = _mm_loadl_epi64(static_cast<const __m128i*>(at));
  return (I16s)_mm_unpacklo_epi8(_mm_setzero_si128(), codes);
}
#endif

// Rebases a small float format: shifts exponent and mantissa into place and corrects the exponent
// bias by a product, which also normalizes subnormals.
CA_INLINE Floats rebias(Ints sign, Ints magnitude, float factor) {
  return bit_cast<Floats>(bit_cast<Ints>(bit_cast<Floats>(magnitude) * splat(factor)) | sign);
}

CA_INLINE Floats load(const BFloat16* at) {
  return bit_cast<Floats>(widen(load_as<U16s>(at)) << 16);
}

CA_INLINE Floats load(const Float16* at) {
#if defined(__AVX2__)
  return from_float16(load_as<I16s>(at));
#elif defined(__aarch64__)
  return bit_cast<Floats>(vcvt_f32_f16(vld1_f16(reinterpret_cast<const float16_t*>(at))));
#else
  const Ints bits = widen(load_as<U16s>(at));
  const Ints magnitude = bits & 0x7fff, sign = (bits & 0x8000) << 16;
  const Floats finite = rebias(sign, magnitude << 13, 0x1p112f);
  const Floats special = bit_cast<Floats>(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  return select(magnitude >= 0x7c00, special, finite);
#endif
}

CA_INLINE Floats load(const int8_t* at) { return to_float(load_i8(at)); }

CA_INLINE Floats load(const Float8E4M3* at) {
#if defined(__AVX2__)
  // As float16, 256 times too small: as float32, a small code would be subnormal when shifted into
  // place, which makes products many times slower.
  const I16s upper = load_u8_high(at);
  const I16s is_nan = (upper & 0x7f00) == 0x7f00;  // all ones
  const I16s number = (upper >> 1 & int16_t(0xbf80)) | is_nan;
  return from_float16(number) * splat(256.0f);
#else
  // Sign extension replicates the sign, so that one shift moves it and the rest into place.
  const Ints bits = load_i8(at) << 20 & int32_t(0x87f00000);
  const Floats finite = bit_cast<Floats>(bits) * splat(0x1p120f);
  const Ints is_nan = (bits & 0x7ff00000) == 0x07f00000;
  return bit_cast<Floats>(bit_cast<Ints>(finite) | is_nan);  // all ones are NaN
#endif
}

// e5m2 is the upper half of float16.
CA_INLINE Floats load(const Float8E5M2* at) {
#if defined(__AVX2__)
  return from_float16(load_u8_high(at));
#else
  const Ints bits = load_u8(at);
  const Ints magnitude = bits & 0x7f, sign = (bits & 0x80) << 24;
  const Floats finite = rebias(sign, magnitude << 21, 0x1p112f);
  const Floats special = bit_cast<Floats>(sign | 0x7f800000 | (magnitude & 3) << 21);
  return select(magnitude >= 0x7c, special, finite);
#endif
}

// Converts one element, via a vector: not for loops.
template <class Element>
inline float element_to_float(Element x) {
  Element padded[kLanes] = {x};
  return load(padded)[0];
}

// Converts n elements, zero-padded to a multiple of kLanes.
template <class Element>
inline void to_floats(const Element* from, int64_t n, float* to) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(to + i, load(from + i));
  if (i < n) {
    Element rest[kLanes] = {};
    std::memcpy(rest, from + i, (n - i) * sizeof(Element));
    store(to + i, load(rest));
  }
}

template <class Element>
inline bool is_finite(const Element* from, int64_t n) {
  float some[kLanes];
  bool finite = true;
  for (int64_t i = 0; i < n; i += kLanes) {
    to_floats(from + i, std::min<int64_t>(n - i, kLanes), some);
    for (float x : some) finite &= bool(std::isfinite(x));
  }
  return finite;
}

inline uint32_t float_bits(float x) { return bit_cast<uint32_t>(x); }

// Conversions from float32 round to nearest even, as torch does.
inline void from_float(float x, float* to) { *to = x; }

inline void from_float(float x, BFloat16* to) {
  const uint32_t bits = float_bits(x);
  to->bits = x != x ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// For formats with `mantissa` bits and an exponent bias.
inline uint32_t round_bits(float x, int mantissa, int bias) {
  const uint32_t magnitude = float_bits(x) & 0x7fffffff;
  const int drop = 23 - mantissa;
  if (magnitude < uint32_t(128 - bias) << 23) {  // subnormal: adding `one` aligns the last bit
    const float one = bit_cast<float>(uint32_t(128 - bias + drop) << 23);
    return float_bits(bit_cast<float>(magnitude) + one) - float_bits(one);
  }
  const uint32_t rebias = uint32_t(127 - bias) << 23;
  return (magnitude - rebias + (1u << (drop - 1)) - 1 + (magnitude >> drop & 1)) >> drop;
}

inline void from_float(float x, Float16* to) {
  const uint32_t magnitude = float_bits(x) & 0x7fffffff, sign = float_bits(x) >> 31 << 15;
  if (magnitude > 0x7f800000) {
    to->bits = sign | 0x7e00;
  } else if (magnitude >= 0x477ff000) {  // 65520 rounds to infinity
    to->bits = sign | 0x7c00;
  } else {
    to->bits = sign | round_bits(x, 10, 15);
  }
}

// Callers clamp to the largest code first.
inline void from_float(float x, Float8E4M3* to) {
  to->bits = float_bits(x) >> 31 << 7 | (x != x ? 0x7f : round_bits(x, 3, 7));
}
inline void from_float(float x, Float8E5M2* to) {
  to->bits = float_bits(x) >> 31 << 7 | (x != x ? 0x7f : round_bits(x, 2, 15));
}
inline void from_float(float x, int8_t* to) { *to = x != x ? 0 : int8_t(std::nearbyint(x)); }

inline float max_code(const int8_t*) { return 127.0f; }
inline float max_code(const Float8E4M3*) { return 448.0f; }
inline float max_code(const Float8E5M2*) { return 57344.0f; }

}  // namespace compiled_attn
