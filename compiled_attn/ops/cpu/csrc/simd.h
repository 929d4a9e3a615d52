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

#define CA_INLINE inline __attribute__((always_inline))
#define CA_NOINLINE __attribute__((noinline))

// What is rarely called in a loop whose sums fill the registers: inlined where there are registers
// for its constants, or else these would take the place of sums.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRegisters = 32;
#define CA_BESIDE_SUMS CA_INLINE
#else
constexpr int kRegisters = 16;
#define CA_BESIDE_SUMS CA_NOINLINE
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

// The same vector, in a register: GCC loads what is used several times again for each use, and a
// load costs as much as a multiply-add.
template <class Vector>
CA_INLINE Vector held(Vector v) {
#if defined(__AVX512F__)
  static_assert(sizeof v == 64, "one register");
  asm("" : "+v"(v));
#endif
  return v;
}

CA_INLINE Floats either(Ints mask, Floats yes, Floats no) {
  return bits_as<Floats>((mask & bits_as<Ints>(yes)) | (~mask & bits_as<Ints>(no)));
}

// b where either is NaN.
template <class Vector>
CA_INLINE Vector larger(Vector a, Vector b) {
#if defined(__AVX512F__)
  if constexpr (sizeof a == 64) return _mm512_max_ps(a, b);
#endif
#if defined(__AVX2__)
  if constexpr (sizeof a == 32) return _mm256_max_ps(a, b);
#endif
  const auto mask = a > b;
  return bits_as<Vector>((mask & bits_as<decltype(a > b)>(a)) |
                         (~mask & bits_as<decltype(a > b)>(b)));
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

// Quarters of four lanes, joined two by two.
template <class Join>
CA_INLINE Floats4 joined_quarters(Floats v, [[maybe_unused]] const Join& join) {
#if defined(__AVX512F__)
  const __m256 half = join(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  return join(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
#elif defined(__AVX2__)
  return join(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
#else
  return bits_as<Floats4>(v);
#endif
}

// The lanes of each of four vectors, joined.
template <class Join>
CA_INLINE Floats4 joined(Floats a, Floats b, Floats c, Floats d, const Join& join) {
  const Floats ab = join(shuffled<Zipped<0>>(a, b), shuffled<Zipped<1>>(a, b));
  const Floats cd = join(shuffled<Zipped<0>>(c, d), shuffled<Zipped<1>>(c, d));
  return joined_quarters(join(shuffled<Halves<0>>(ab, cd), shuffled<Halves<1>>(ab, cd)), join);
}

CA_INLINE Floats4 sums(Floats a, Floats b, Floats c, Floats d) {
  return joined(a, b, c, d, [](auto x, auto y) { return x + y; });
}

CA_INLINE Floats4 largest(Floats a, Floats b, Floats c, Floats d) {
  return joined(a, b, c, d, [](auto x, auto y) { return larger(x, y); });
}

CA_INLINE Ints ramp() {
  Ints v{};
  for (int i = 0; i < kLanes; ++i) v[i] = i;
  return v;
}

CA_INLINE Floats as_floats(Ints v) { return __builtin_convertvector(v, Floats); }

// To the nearest, and of two to the even one; the larger of each two lanes, and of all lanes.
#if defined(__AVX512F__)
CA_INLINE Ints rounded(Floats v) { return bits_as<Ints>(_mm512_cvtps_epi32(v)); }
CA_INLINE Ints larger_of(Ints a, Ints b) {
  return bits_as<Ints>(_mm512_max_epi32((__m512i)a, (__m512i)b));
}
CA_INLINE int32_t largest_of(Ints v) { return _mm512_reduce_max_epi32((__m512i)v); }
#elif defined(__AVX2__)
CA_INLINE Ints rounded(Floats v) { return bits_as<Ints>(_mm256_cvtps_epi32(v)); }
CA_INLINE Ints larger_of(Ints a, Ints b) {
  return bits_as<Ints>(_mm256_max_epi32((__m256i)a, (__m256i)b));
}
CA_INLINE int32_t largest_of(Ints v) {
  int32_t most = v[0];
  for (int i = 1; i < kLanes; ++i) most = v[i] > most ? v[i] : most;
  return most;
}
#endif

// Each of some vectors becomes f of itself.
template <int count, class Function>
CA_INLINE void apply(Floats (&v)[count], const Function& f) {
#pragma GCC unroll 8
  for (int i = 0; i < count; ++i) v[i] = f(v[i], i);
}

// Each becomes a polynomial of degree 5 of itself, whose last coefficient is 1. Step by step for all
// vectors: compilers leave the order as it is written, and processors do not look far enough ahead.
template <int count>
CA_INLINE void polynomials(Floats (&r)[count], const float (&coefficients)[5]) {
  Floats p[count];
  apply(p, [&](Floats, int) { return all(coefficients[0]); });
#pragma GCC unroll 8
  for (int k = 1; k < 5; ++k)
    apply(p, [&](Floats so_far, int i) { return so_far * r[i] + all(coefficients[k]); });
  apply(r, [&](Floats each, int i) { return p[i] * each + all(1.0f); });
}

// e^r for |r| <= log(2) / 2, relative error 1.7e-7, and 1 at 0. Errors of this polynomial and the
// next were made even by weighted least squares (Lawson, 1961).
template <int count>
CA_INLINE void exponentials_near_zero(Floats (&r)[count]) {
  constexpr float coefficients[] = {8.312501e-3f, 4.189033e-2f, 1.6667116e-1f, 4.999923e-1f, 1.0f};
  polynomials(r, coefficients);
}

// 2^r for |r| <= 1 / 2, relative error 1.9e-7, and 1 at 0.
template <int count>
CA_INLINE void powers_near_zero(Floats (&r)[count]) {
  constexpr float coefficients[] = {1.3264727e-3f, 9.671513e-3f, 5.5507336e-2f, 2.4022242e-1f,
                                    6.93147e-1f};
  polynomials(r, coefficients);
}

// x - n * log(2). The logarithm's own rounding is worth 2e-9 * n; without fused multiply-adds the
// product is rounded too, as x is.
CA_INLINE Floats without_powers(Floats x, Floats n) { return x - n * all(0.693147180f); }

// p * 2^n, 0 where x is below the least; NaN where it is NaN. `shifted` is n + 1.5 * 2^23, whose low
// bits are the integer.
CA_INLINE Floats with_power(Floats p, Floats shifted, Floats x, float least) {
  typedef uint32_t Bits __attribute__((vector_size(4 * kLanes), may_alias));  // these may overflow
  const Floats scaled = bits_as<Floats>(bits_as<Bits>(p) + (bits_as<Bits>(shifted) << 23));
  return either(x < all(least), Floats{}, either(x == x, scaled, x));
}

// e^x for x <= 0 or so; 0 below -87, NaN stays NaN. Relative error 2e-7 near 0, 4e-7 near -87, and
// without fused multiply-adds 6e-8 * |x|.
template <int count>
CA_INLINE void exponentials(Floats (&x)[count]) {
#if defined(__AVX512F__)
  __mmask16 is_visible[count];
  Floats n[count];
  apply(n, [&](Floats, int i) {
    is_visible[i] = _mm512_cmp_ps_mask(x[i], all(-87.0f), _CMP_NLT_UQ);
    return x[i] * all(1.44269504f);
  });
  apply(n, [&](Floats v, int) -> Floats {
    return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT);
  });
  apply(x, [&](Floats v, int i) { return without_powers(v, n[i]); });
  exponentials_near_zero(x);
  apply(x, [&](Floats p, int i) -> Floats {
    return _mm512_maskz_scalef_ps(is_visible[i], p, n[i]);
  });
#else
  Floats in[count], shifted[count], p[count];
  apply(in, [&](Floats, int i) { return either(x[i] < all(-87.0f), Floats{}, x[i]); });
  apply(shifted, [&](Floats, int i) {
    return in[i] * all(1.44269504f) + all(12582912.0f);  // 1.5 * 2^23 rounds
  });
  apply(p, [&](Floats, int i) { return without_powers(in[i], shifted[i] - all(12582912.0f)); });
  exponentials_near_zero(p);
  apply(x, [&](Floats v, int i) { return with_power(p[i], shifted[i], v, -87.0f); });
#endif
}

// 2^x for x <= 0 or so; 0 below -126, NaN stays NaN. Relative error 2e-7.
template <int count>
CA_INLINE void powers_of_two(Floats (&x)[count]) {
  Floats n[count];
#if defined(__AVX512F__)
  __mmask16 is_visible[count];
  apply(n, [&](Floats, int i) -> Floats {
    is_visible[i] = _mm512_cmp_ps_mask(x[i], all(-126.0f), _CMP_NLT_UQ);
    return _mm512_roundscale_ps(x[i], _MM_FROUND_TO_NEAREST_INT);
  });
  apply(x, [&](Floats v, int i) { return v - n[i]; });
  powers_near_zero(x);
  apply(x, [&](Floats p, int i) -> Floats {
    return _mm512_maskz_scalef_ps(is_visible[i], p, n[i]);
  });
#else
  Floats in[count], p[count];
  apply(in, [&](Floats, int i) { return either(x[i] < all(-126.0f), Floats{}, x[i]); });
  apply(n, [&](Floats, int i) { return in[i] + all(12582912.0f); });  // 1.5 * 2^23 rounds
  apply(p, [&](Floats, int i) { return in[i] - (n[i] - all(12582912.0f)); });
  powers_near_zero(p);
  apply(x, [&](Floats v, int i) { return with_power(p[i], n[i], v, -126.0f); });
#endif
}

CA_INLINE Floats exponential(Floats x) {
  Floats one[] = {x};
  exponentials(one);
  return one[0];
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

CA_INLINE void transpose(Floats4 (&rows)[4]) {
  Floats4 columns[4];
  for (int i = 0; i < 4; ++i) columns[i] = Floats4{rows[0][i], rows[1][i], rows[2][i], rows[3][i]};
  for (int i = 0; i < 4; ++i) rows[i] = columns[i];
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
