// Vectors of floats for the instruction set of this translation unit.
//
// Arithmetic is that of the compilers' vector extensions; intrinsics stand only where these have no
// word for it. Contraction of a * b + c to a fused multiply-add is on (-ffp-contract=fast).
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace compiled_attn {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRegisters = 32;
#else
constexpr int kRegisters = 16;
#endif

#define CA_INLINE inline __attribute__((always_inline))

#if defined(__clang__)
#define CA_NO_CONTRACTION
#else
#define CA_NO_CONTRACTION __attribute__((optimize("fp-contract=off")))
#endif

typedef float Floats __attribute__((vector_size(4 * kLanes), may_alias));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes), may_alias));
typedef float Floats4 __attribute__((vector_size(16), may_alias));

template <class Vector, class Element>
CA_INLINE Vector load_as(const Element* at) {
  Vector v;
  std::memcpy(&v, at, sizeof v);
  return v;
}

CA_INLINE Floats load(const float* at) { return load_as<Floats>(at); }
template <class Vector>  // Floats or Floats4, which may be the same
CA_INLINE void store(float* at, Vector v) {
  std::memcpy(at, &v, sizeof v);
}
CA_INLINE Floats all(float x) { return x - Floats{}; }  // x - 0 keeps -0, unlike 0 + x
CA_INLINE Ints all(int32_t x) { return x + Ints{}; }

template <class To, class From>
CA_INLINE To bits_as(From v) {
  static_assert(sizeof(To) == sizeof(From), "same bits");
  To to;
  std::memcpy(&to, &v, sizeof to);
  return to;
}

CA_INLINE Floats either(Ints mask, Floats yes, Floats no) {
  return bits_as<Floats>((mask & bits_as<Ints>(yes)) | (~mask & bits_as<Ints>(no)));
}

CA_INLINE Floats larger(Floats a, Floats b) {
#if defined(__AVX512F__)
  return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_max_ps(a, b);
#else
  return either(a > b, a, b);
#endif
}

// Lane i of the result is lane index(i) of a followed by b.
template <class Index, int... i>
CA_INLINE Floats shuffled(Floats a, Floats b, std::integer_sequence<int, i...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, Index::at(i)...);
#else
  return __builtin_shuffle(a, b, Ints{Index::at(i)...});
#endif
}

template <class Index>
CA_INLINE Floats shuffled(Floats a, Floats b) {
  return shuffled<Index>(a, b, std::make_integer_sequence<int, kLanes>{});
}

// In each quarter of four lanes: a0 b0 a1 b1, or with Half 1 a2 b2 a3 b3.
template <int Half>
struct Zipped {
  static constexpr int at(int i) { return i / 4 * 4 + 2 * Half + i % 4 / 2 + i % 2 * kLanes; }
};

// In each quarter: a0 a1 b0 b1, or with Half 1 a2 a3 b2 b3.
template <int Half>
struct Halves {
  static constexpr int at(int i) { return i / 4 * 4 + 2 * Half + i % 2 + i % 4 / 2 * kLanes; }
};

CA_INLINE Floats4 sum_of_quarters(Floats v) {
#if defined(__AVX512F__)
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
#elif defined(__AVX2__)
  return _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
#else
  return bits_as<Floats4>(v);
#endif
}

// The sums of the lanes of four vectors.
CA_INLINE Floats4 sums(Floats a, Floats b, Floats c, Floats d) {
  const Floats ab = shuffled<Zipped<0>>(a, b) + shuffled<Zipped<1>>(a, b);
  const Floats cd = shuffled<Zipped<0>>(c, d) + shuffled<Zipped<1>>(c, d);
  return sum_of_quarters(shuffled<Halves<0>>(ab, cd) + shuffled<Halves<1>>(ab, cd));
}

CA_INLINE float sum(Floats v) {
  const Floats4 s = sum_of_quarters(v);
  return (s[0] + s[2]) + (s[1] + s[3]);
}

CA_INLINE float largest(Floats v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(v);
#else
  float most = v[0];
  for (int i = 1; i < kLanes; ++i) most = v[i] > most ? v[i] : most;
  return most;
#endif
}

CA_INLINE Ints ramp() {
  Ints v{};
  for (int i = 0; i < kLanes; ++i) v[i] = i;
  return v;
}

CA_INLINE Floats as_floats(Ints v) { return __builtin_convertvector(v, Floats); }

// e^r for |r| <= log(2) / 2: a polynomial of degree 6 (the coefficients are those of Cephes).
CA_INLINE Floats exponential_near_zero(Floats r) {
  Floats p = all(1.9875691500e-4f);
  p = p * r + all(1.3981999507e-3f);
  p = p * r + all(8.3334519073e-3f);
  p = p * r + all(4.1665795894e-2f);
  p = p * r + all(1.6666665459e-1f);
  p = p * r + all(5.0000001201e-1f);
  return p * (r * r) + (r + all(1.0f));
}

// x - n * log(2), in two steps that lose nothing (Cody and Waite).
CA_INLINE Floats without_powers(Floats x, Floats n) {
  return (x - n * all(0.693359375f)) - n * all(-2.12194440e-4f);
}

// e^x for x <= 0 or so, relative error 2e-7; 0 below -87, NaN stays NaN.
CA_INLINE Floats exponential(Floats x) {
#if defined(__AVX512F__)
  const __mmask16 is_visible = _mm512_cmp_ps_mask(x, all(-87.0f), _CMP_NLT_UQ);
  const Floats n = _mm512_roundscale_ps(x * all(1.44269504f), _MM_FROUND_TO_NEAREST_INT);
  return _mm512_maskz_scalef_ps(is_visible, exponential_near_zero(without_powers(x, n)), n);
#else
  const Ints tiny = x < all(-87.0f);
  const Floats in = either(tiny, Floats{}, x);
  const Floats shifted = in * all(1.44269504f) + all(12582912.0f);  // 1.5 * 2^23 rounds
  const Floats n = shifted - all(12582912.0f);
  const Floats p = exponential_near_zero(without_powers(in, n));
  const Ints power = bits_as<Ints>(shifted) << 23;  // the integer sits in the low bits
  const Floats scaled = bits_as<Floats>(bits_as<Ints>(p) + power);
  return either(tiny, Floats{}, either(x == x, scaled, x));
#endif
}

// Relative error 3e-7. A polynomial below 0.625 (coefficients of Cephes), exponentials above.
CA_INLINE Floats hyperbolic_tangent(Floats x) {
  const Ints sign = bits_as<Ints>(x) & INT32_MIN;
  const Floats size = bits_as<Floats>(bits_as<Ints>(x) ^ sign);
  const Floats e = exponential(size * all(-2.0f));
  const Floats far = (all(1.0f) - e) / (all(1.0f) + e);
  const Floats z = x * x;
  Floats p = all(-5.70498872745e-3f);
  p = p * z + all(2.06390887954e-2f);
  p = p * z - all(5.37397155531e-2f);
  p = p * z + all(1.33314422036e-1f);
  p = p * z - all(3.33332819422e-1f);
  const Floats near = p * z * x + x;
  const Floats signed_far = bits_as<Floats>(bits_as<Ints>(far) | sign);
  return either(size < all(0.625f), near, signed_far);
}

// Rows of kLanes vectors become columns.
template <int Step>
struct Low {
  static constexpr int at(int i) { return i & Step ? kLanes + i - Step : i; }
};
template <int Step>
struct High {
  static constexpr int at(int i) { return i & Step ? kLanes + i : i + Step; }
};

template <int Step = 1>
CA_INLINE void transpose(Floats (&rows)[kLanes]) {
  for (int i = 0; i < kLanes; ++i) {
    if (i & Step) continue;
    const Floats a = rows[i], b = rows[i + Step];
    rows[i] = shuffled<Low<Step>>(a, b);
    rows[i + Step] = shuffled<High<Step>>(a, b);
  }
  if constexpr (2 * Step < kLanes) transpose<2 * Step>(rows);
}

}  // namespace compiled_attn
