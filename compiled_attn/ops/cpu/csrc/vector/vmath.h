// Vector exponentials, tanh and SiLU.
#pragma once

#include "vector/simd.h"

namespace compiled_attn {

constexpr float kLog2E = 1.44269504f, kLog2 = 0.693147180f;

// Applies f to each vector.
template <int count, class Function>
CA_INLINE void apply(Floats (&v)[count], const Function& f) {
#pragma GCC unroll 8
  for (int i = 0; i < count; ++i) v[i] = f(v[i], i);
}

// Evaluates a polynomial of degree 5 whose constant coefficient is 1. Interleaves the vectors:
// compilers keep the written order, and out-of-order windows are too short to overlap chains.
template <int count>
CA_INLINE void polynomials(Floats (&r)[count], const float (&coefficients)[5]) {
  Floats p[count];
  apply(p, [&](Floats, int) { return splat(coefficients[0]); });
#pragma GCC unroll 8
  for (int k = 1; k < 5; ++k)
    apply(p, [&](Floats so_far, int i) { return so_far * r[i] + splat(coefficients[k]); });
  apply(r, [&](Floats each, int i) { return p[i] * each + splat(1.0f); });
}

// p * 2^n; 0 where x < least, NaN where x is NaN. `shifted` is n + kRound, whose low bits hold n.
CA_INLINE Floats scale_by_exp2(Floats p, Floats shifted, Floats x, float least) {
  typedef uint32_t Bits __attribute__((vector_size(4 * kLanes), may_alias));  // may overflow
  const Floats scaled = bit_cast<Floats>(bit_cast<Bits>(p) + (bit_cast<Bits>(shifted) << 23));
  return select(x < splat(least), Floats{}, select(x == x, scaled, x));
}

// Computes p(x - reduce(n)) * 2^n for n = round(to_log2(x)); 0 where x < least, NaN where x is NaN.
template <int count, class ToLog2, class Reduce>
CA_INLINE void exponentials(Floats (&x)[count], const float (&coefficients)[5], float least,
                            const ToLog2& to_log2, const Reduce& reduce) {
  Floats n[count];
#if defined(__AVX512F__)
  __mmask16 is_visible[count];
  apply(n, [&](Floats, int i) -> Floats {
    is_visible[i] = _mm512_cmp_ps_mask(x[i], splat(least), _CMP_NLT_UQ);
    return to_log2(x[i]);
  });
  apply(n, [&](Floats v, int) -> Floats {
    return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT);
  });
  apply(x, [&](Floats v, int i) { return reduce(v, n[i]); });
  polynomials(x, coefficients);
  apply(x, [&](Floats p, int i) -> Floats {
    return _mm512_maskz_scalef_ps(is_visible[i], p, n[i]);
  });
#else
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  Floats in[count], p[count];
  apply(in, [&](Floats, int i) { return select(x[i] < splat(least), Floats{}, x[i]); });
  apply(n, [&](Floats, int i) { return to_log2(in[i]) + splat(kRound); });
  apply(p, [&](Floats, int i) { return reduce(in[i], n[i] - splat(kRound)); });
  polynomials(p, coefficients);
  apply(x, [&](Floats v, int i) { return scale_by_exp2(p[i], n[i], v, least); });
#endif
}

// Minimax fits by weighted least squares (Lawson, 1961), exact at 0. kExp: e^r for |r| <= log(2) /
// 2, relative error 1.7e-7; kExp2: 2^r for |r| <= 1 / 2, relative error 1.9e-7.
constexpr float kExp[] = {8.312501e-3f, 4.189033e-2f, 1.6667116e-1f, 4.999923e-1f, 1.0f};
constexpr float kExp2[] = {1.3264727e-3f, 9.671513e-3f, 5.5507336e-2f, 2.4022242e-1f, 6.93147e-1f};

// e^x for x <= 0; 0 below -87, propagates NaN. Relative error 2e-7 near 0, 4e-7 near -87; without
// fused multiply-adds 6e-8 * |x|, since the reduction rounds.
template <int count>
CA_INLINE void vexp(Floats (&x)[count]) {
  exponentials(
      x, kExp, -87.0f, [](Floats v) { return v * splat(kLog2E); },
      [](Floats v, Floats n) { return v - n * splat(kLog2); });
}

// 2^x for x <= 0; 0 below -126, propagates NaN. Relative error 2e-7.
template <int count>
CA_INLINE void vexp2(Floats (&x)[count]) {
  exponentials(
      x, kExp2, -126.0f, [](Floats v) { return v; }, [](Floats v, Floats n) { return v - n; });
}

CA_INLINE Floats vexp(Floats x) {
  Floats one[] = {x};
  vexp(one);
  return one[0];
}

// tanh(x), relative error 3e-7: a polynomial below 0.625 (Cephes), exponentials above.
CA_INLINE Floats vtanh(Floats x) {
  const Ints sign = bit_cast<Ints>(x) & INT32_MIN;
  const Floats size = bit_cast<Floats>(bit_cast<Ints>(x) ^ sign);
  const Floats e = vexp(size * splat(-2.0f));
  const Floats far = (splat(1.0f) - e) / (splat(1.0f) + e);
  const Floats z = x * x;
  Floats p = splat(-5.70498872745e-3f);
  p = p * z + splat(2.06390887954e-2f);
  p = p * z - splat(5.37397155531e-2f);
  p = p * z + splat(1.33314422036e-1f);
  p = p * z - splat(3.33332819422e-1f);
  const Floats near = p * z * x + x;
  const Floats signed_far = bit_cast<Floats>(bit_cast<Ints>(far) | sign);
  return select(size < splat(0.625f), near, signed_far);
}

// 2^x, relative error 3e-6, exact at 0: a polynomial of degree 4 on [0, 1).
CA_INLINE Floats vexp2_fast(Floats x) {
#if defined(__AVX512DQ__)
  const Floats f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF);
  Floats p = splat(1.3426688e-2f);
  p = p * f + splat(5.2242468e-2f);
  p = p * f + splat(2.4128021e-1f);
  p = p * f + splat(6.9304484e-1f);
  p = p * f + splat(1.0f);
  return _mm512_scalef_ps(p, x);
#else
  return vexp(x * splat(kLog2));
#endif
}

// x / (1 + e^-x): NaN at -inf as in torch; -0 below -87, where torch returns at most 1e-36.
CA_INLINE Floats vsilu(Floats x) {
  const Ints is_negative = x < Floats{};
  const Floats e = vexp(select(is_negative, x, -x));
  return x * (select(is_negative, e, splat(1.0f)) / (splat(1.0f) + e));
}

// e^x for x <= 0 in float64, relative error 2^-50, exact at 0; clamps x to -700. A Taylor
// polynomial times a power of two.
CA_INLINE double exp_double(double x) {
  const double in = x < -700.0 ? -700.0 : x;
  const double shifted = in * 1.44269504088896340736 + 0x1.8p52;  // rounds
  const double n = shifted - 0x1.8p52;
  // log(2) split in two; the first part ends in zeros.
  const double r = in - n * 6.93147180369123816490e-01 - n * 1.90821492927058770002e-10;
  double p = 1.0 / 6227020800;
  p = p * r + 1.0 / 479001600;
  p = p * r + 1.0 / 39916800;
  p = p * r + 1.0 / 3628800;
  p = p * r + 1.0 / 362880;
  p = p * r + 1.0 / 40320;
  p = p * r + 1.0 / 5040;
  p = p * r + 1.0 / 720;
  p = p * r + 1.0 / 120;
  p = p * r + 1.0 / 24;
  p = p * r + 1.0 / 6;
  p = p * r + 0.5;
  p = p * r + 1.0;
  p = p * r + 1.0;
  return bit_cast<double>(bit_cast<uint64_t>(p) + (bit_cast<uint64_t>(shifted) << 52));
}

}  // namespace compiled_attn
