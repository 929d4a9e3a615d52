// Element types of queries and caches, as floats.
#pragma once

#include <algorithm>
#include <cmath>

#include "abi.h"
#include "simd.h"

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

typedef uint16_t Words __attribute__((vector_size(2 * kLanes), may_alias));
typedef int16_t SignedWords __attribute__((vector_size(2 * kLanes), may_alias));
typedef uint8_t Bytes __attribute__((vector_size(kLanes), may_alias));
typedef int8_t SignedBytes __attribute__((vector_size(kLanes), may_alias));

CA_INLINE Ints widened(Words v) { return __builtin_convertvector(v, Ints); }

#if defined(__AVX512F__)
CA_INLINE Ints bytes_at(const void* at) {
  return bits_as<Ints>(_mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(at))));
}
CA_INLINE Ints signed_bytes_at(const void* at) {
  return bits_as<Ints>(_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(at))));
}
#elif defined(__AVX2__)
CA_INLINE Ints bytes_at(const void* at) {
  return bits_as<Ints>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(at))));
}
CA_INLINE Ints signed_bytes_at(const void* at) {
  return bits_as<Ints>(_mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(at))));
}
#else
CA_INLINE Ints bytes_at(const void* at) {
  return __builtin_convertvector(load_as<Bytes>(static_cast<const uint8_t*>(at)), Ints);
}
CA_INLINE Ints signed_bytes_at(const void* at) {
  return __builtin_convertvector(load_as<SignedBytes>(static_cast<const uint8_t*>(at)), Ints);
}
#endif

#if defined(__AVX512F__)
CA_INLINE Floats from_float16(SignedWords v) { return _mm512_cvtph_ps((__m256i)v); }

// Codes of 8 bits, each the upper half of 16.
CA_INLINE SignedWords upper_halves_at(const void* at) {
  const __m128i codes = _mm_loadu_si128(static_cast<const __m128i*>(at));
  return (SignedWords)_mm256_slli_epi16(_mm256_cvtepu8_epi16(codes), 8);
}
#elif defined(__AVX2__)
CA_INLINE Floats from_float16(SignedWords v) { return _mm256_cvtph_ps((__m128i)v); }

CA_INLINE SignedWords upper_halves_at(const void* at) {
  const __m128i codes = _mm_loadl_epi64(static_cast<const __m128i*>(at));
  return (SignedWords)_mm_unpacklo_epi8(_mm_setzero_si128(), codes);
}
#endif

// Small floats with a sign, an exponent and a mantissa below each other: shifted to where a float
// has them, and the exponent's offset made good by a product, which also mends subnormals.
CA_INLINE Floats rebased(Ints sign, Ints magnitude, float factor) {
  return bits_as<Floats>(bits_as<Ints>(bits_as<Floats>(magnitude) * all(factor)) | sign);
}

CA_INLINE Floats load(const BFloat16* at) {
  return bits_as<Floats>(widened(load_as<Words>(at)) << 16);
}

CA_INLINE Floats load(const Float16* at) {
#if defined(__AVX2__)
  return from_float16(load_as<SignedWords>(at));
#elif defined(__aarch64__)
  return bits_as<Floats>(vcvt_f32_f16(vld1_f16(reinterpret_cast<const float16_t*>(at))));
#else
  const Ints bits = widened(load_as<Words>(at));
  const Ints magnitude = bits & 0x7fff, sign = (bits & 0x8000) << 16;
  const Floats finite = rebased(sign, magnitude << 13, 0x1p112f);
  const Floats special = bits_as<Floats>(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  return either(magnitude >= 0x7c00, special, finite);
#endif
}

CA_INLINE Floats load(const int8_t* at) { return as_floats(signed_bytes_at(at)); }

// Codes in upper halves as float16, kE4M3Unit times too small; with finite, where none is NaN.
constexpr float kE4M3Unit = 256;
template <bool finite, class Uppers>
CA_INLINE Uppers e4m3_as_float16(Uppers upper) {
  const Uppers number = upper >> 1 & int16_t(0xbf80);
  if (finite) return number;
  return number | ((upper & 0x7f00) == 0x7f00);  // all ones are a NaN
}

CA_INLINE Floats load(const Float8E4M3* at) {
#if defined(__AVX2__)
  // As a float shifted into place, a small code is subnormal: products of such take many times as
  // long.
  return from_float16(e4m3_as_float16<false>(upper_halves_at(at))) * all(kE4M3Unit);
#else
  // The sign is spread over the bits above, so that one shift takes it and the rest to their
  // places.
  const Ints bits = signed_bytes_at(at) << 20 & int32_t(0x87f00000);
  const Floats finite = bits_as<Floats>(bits) * all(0x1p120f);
  const Ints is_nan = (bits & 0x7ff00000) == 0x07f00000;
  return bits_as<Floats>(bits_as<Ints>(finite) | is_nan);  // all ones are a NaN
#endif
}

// The upper halves of floats of 16 bits.
CA_INLINE Floats load(const Float8E5M2* at) {
#if defined(__AVX2__)
  return from_float16(upper_halves_at(at));
#else
  const Ints bits = bytes_at(at);
  const Ints magnitude = bits & 0x7f, sign = (bits & 0x80) << 24;
  const Floats finite = rebased(sign, magnitude << 21, 0x1p112f);
  const Floats special = bits_as<Floats>(sign | 0x7f800000 | (magnitude & 3) << 21);
  return either(magnitude >= 0x7c, special, finite);
#endif
}

// One element, by way of a vector: for what is not worth a loop of its own.
template <class Element>
inline float value_of(Element x) {
  Element padded[kLanes] = {x};
  return load(padded)[0];
}

// n elements as floats, and zeros up to a multiple of kLanes.
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

inline uint32_t float_bits(float x) { return bits_as<uint32_t>(x); }

// Rounded to nearest, ties to even, as torch does.
inline void from_float(float x, float* to) { *to = x; }

inline void from_float(float x, BFloat16* to) {
  const uint32_t bits = float_bits(x);
  to->bits = x != x ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// Shared by the formats with few bits: `mantissa` bits, exponents offset by `bias`.
inline uint32_t rounded_bits(float x, int mantissa, int bias) {
  const uint32_t magnitude = float_bits(x) & 0x7fffffff;
  const int drop = 23 - mantissa;
  if (magnitude < uint32_t(128 - bias) << 23) {  // subnormal: add what aligns the last bit
    const float one = bits_as<float>(uint32_t(128 - bias + drop) << 23);
    return float_bits(bits_as<float>(magnitude) + one) - float_bits(one);
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
    to->bits = sign | rounded_bits(x, 10, 15);
  }
}

// Saturated; the caller clamps to the largest code first, so only NaN needs care.
inline void from_float(float x, Float8E4M3* to) {
  to->bits = float_bits(x) >> 31 << 7 | (x != x ? 0x7f : rounded_bits(x, 3, 7));
}
inline void from_float(float x, Float8E5M2* to) {
  to->bits = float_bits(x) >> 31 << 7 | (x != x ? 0x7f : rounded_bits(x, 2, 15));
}
inline void from_float(float x, int8_t* to) { *to = x != x ? 0 : int8_t(std::nearbyint(x)); }

// The largest code of a quantised cache.
inline float largest_code(const int8_t*) { return 127.0f; }
inline float largest_code(const Float8E4M3*) { return 448.0f; }
inline float largest_code(const Float8E5M2*) { return 57344.0f; }

}  // namespace compiled_attn
