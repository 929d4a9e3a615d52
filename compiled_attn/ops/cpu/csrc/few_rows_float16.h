// Few rows against floats of 8 bits (e4m3), by way of float16.
//
// Of two codes that lie side by side, a shift and a mask make a float16 of each, 256 times too
// small: nothing is widened but by the conversion to floats. So queries and sums have the even
// elements of each vector of codes first, then the odd ones. The factor is made good at the end, so
// that sums below 2^-118 lose bits.
//
// It would make a number of a NaN: before each few rows of queries, rows of the cache are searched
// for one, and taken with more care if there is.
#pragma once

#include "few_rows_loops.h"

#if defined(__AVX2__) && defined(__F16C__) && !defined(__AVX512F__)
#define CA_HAS_E4M3_AS_FLOAT16 1

namespace compiled_attn {

struct InFloat16 : PlainWeights<float> {
  using Element = Float8E4M3;
  using Query = float;
  using Codes = __m256i;  // 32
  typedef int16_t Uppers __attribute__((vector_size(32), may_alias));
  static constexpr int kWide = 4 * kLanes, kKeys = 2, kValues = 8, kRun = kValues;

  static CA_INLINE Codes codes(const Element* at) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
  }

  // The even ones, or the odd ones, as floats; with finite, where none is NaN.
  template <bool finite, bool odd>
  static CA_INLINE void numbers(Codes codes, Floats (&out)[2]) {
    const Uppers upper = bits_as<Uppers>(odd ? codes : _mm256_slli_epi16(codes, 8));
    const __m256i halves = bits_as<__m256i>(e4m3_as_float16<finite>(upper));
    out[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
    out[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
  }

  // Whether no code of some rows is NaN, of the elements [begin, end).
  template <int count>
  static CA_INLINE bool are_finite(const Element* const* rows, int64_t begin, int64_t end) {
    const Codes nan = _mm256_set1_epi8(0x7f);  // but for its sign
    Codes largest = _mm256_setzero_si256();
    for (int64_t d = begin; d < end; d += kWide)
#pragma GCC unroll 8
      for (int i = 0; i < count; ++i)
        largest = _mm256_max_epi8(largest, _mm256_and_si256(codes(rows[i] + d), nan));
    return !_mm256_movemask_epi8(_mm256_cmpeq_epi8(largest, nan));
  }

  template <class Body>
  static CA_INLINE void by_parity(const Body& body) {
    body(std::false_type{});
    body(std::true_type{});
  }

  void arrange(float* query, int64_t dim) const {
    for (float* at = query; at < query + dim; at += kWide) {
      Floats old[4];
      for (int i = 0; i < 4; ++i) old[i] = load(at + i * kLanes);
      for (int i = 0; i < 2; ++i)
        evens_first(old[2 * i], old[2 * i + 1], at + i * kLanes, at + (2 + i) * kLanes);
    }
  }
  void finish(float* sums, int64_t dim) const {
    for (float* at = sums; at < sums + dim; at += kWide) {
      Floats old[4];
      for (int i = 0; i < 4; ++i) old[i] = load(at + i * kLanes) * all(kE4M3Unit);
      for (int i = 0; i < 2; ++i) in_turns(old[i], old[2 + i], at + 2 * i * kLanes);
    }
  }
};

template <bool finite, int rows>
CA_INLINE void products_of(const float* query, int64_t dim, const Float8E4M3* const* keys,
                           float* out, Ahead ahead) {
  using Math = InFloat16;
  Floats sum[rows + rows % 2][2] = {};
  for (int64_t d = 0; d < dim; d += Math::kWide) {
    prefetch<1>(ahead + Math::kKeys * d);
    Math::by_parity([&](auto odd) {
      Floats key[2][2];
      for (int i = 0; i < 2; ++i) Math::numbers<finite, odd>(Math::codes(keys[i] + d), key[i]);
      for (int half = 0; half < 2; ++half)
        for (int r = 0; r < rows; ++r) {
          const Floats q = load(query + r * dim + d + (2 * odd + half) * kLanes);
          for (int i = 0; i < 2; ++i) sum[r][i] += key[i][half] * q;
        }
    });
  }
  for (int r = 0; r < rows; r += 2) {
    const Floats4 s = sums(sum[r][0], sum[r][1], sum[r + 1][0], sum[r + 1][1]) * kE4M3Unit;
    for (int i = 0; i < 2 && r + i < rows; ++i)
      std::memcpy(out + (r + i) * kChunk, reinterpret_cast<const float*>(&s) + 2 * i,
                  2 * sizeof(float));
  }
}

// Where a code is NaN.
template <int rows>
CA_NOINLINE void products_of_any(const float* query, int64_t dim, const Float8E4M3* const* keys,
                                 float* out, Ahead ahead) {
  products_of<false, rows>(query, dim, keys, out, ahead);
}

// The products that FewRows needs.
template <int rows>
CA_INLINE void products(const InFloat16& math, const float* query, int64_t dim,
                        const Float8E4M3* const* keys, float* out, Ahead ahead) {
  if (math.are_finite<InFloat16::kKeys>(keys, 0, dim))
    products_of<true, rows>(query, dim, keys, out, ahead);
  else
    products_of_any<rows>(query, dim, keys, out, ahead);
}

// Adds kWide elements of the values, weighted.
template <bool finite, int rows>
CA_INLINE void add_values(const InFloat16::Weights* weights, int64_t first,
                          const Float8E4M3* const* values, int64_t d, float* sums, int64_t dim,
                          Ahead ahead) {
  using Math = InFloat16;
  Math::by_parity([&](auto odd) {
    float* at = sums + d + odd * 2 * kLanes;
    Floats sum[rows][2];
    for (int r = 0; r < rows; ++r)
      for (int w = 0; w < 2; ++w) sum[r][w] = load(at + r * dim + w * kLanes);
    for (int t = 0; t < Math::kValues; ++t) {
      if (!odd && t % 2 == 0) prefetch<1>(ahead + t * Math::kWide);
      Floats value[2];
      Math::numbers<finite, odd>(Math::codes(values[t] + d), value);
      for (int r = 0; r < rows; ++r)
        for (int w = 0; w < 2; ++w) sum[r][w] += value[w] * all(weights[r].of[first + t]);
    }
    for (int r = 0; r < rows; ++r)
      for (int w = 0; w < 2; ++w) store(at + r * dim + w * kLanes, sum[r][w]);
  });
}

// Where a code is NaN.
template <int rows>
CA_NOINLINE void add_any_values(const InFloat16::Weights* weights, int64_t first,
                                const Float8E4M3* const* values, int64_t d, float* sums,
                                int64_t dim, Ahead ahead) {
  add_values<false, rows>(weights, first, values, d, sums, dim, ahead);
}

template <int rows>
CA_INLINE void weighted_sums(const InFloat16& math, const InFloat16::Weights* weights,
                             int64_t first, const Float8E4M3* const* values, float* sums,
                             int64_t dim, const Ahead* ahead) {
  for (int64_t d = 0; d < dim; d += math.kWide) {
    const Ahead next = *ahead + math.kValues * d;
    if (math.are_finite<InFloat16::kValues>(values, d, d + math.kWide))
      add_values<true, rows>(weights, first, values, d, sums, dim, next);
    else
      add_any_values<rows>(weights, first, values, d, sums, dim, next);
  }
}

}  // namespace compiled_attn

#else
#define CA_HAS_E4M3_AS_FLOAT16 0
#endif
