// Few rows against integers of 8 bits, without products of octets: those of integers of 16 bits.
//
// As `InDigits`, a query and the weights of some tokens become integers of 16 bits; codes are
// widened to as many. A product adds up two neighbours: two elements of a key, or two tokens'
// values.
#pragma once

#include "few_rows_loops.h"
#include "fixed.h"

#if defined(__AVX2__) && !defined(__AVX512F__)
#define CA_HAS_WORD_PRODUCTS 1

namespace compiled_attn {

constexpr int kWords = 16;  // integers of 16 bits in a vector

// Sixteen codes.
CA_INLINE __m128i codes_of(const int8_t* at) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
}

CA_INLINE __m256i words_at(const int16_t* at) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
}

CA_INLINE Ints add_words(Ints sum, __m256i a, __m256i b) {
  return sum + bits_as<Ints>(_mm256_madd_epi16(a, b));
}

CA_INLINE void store_words(Ints v, int16_t* to) {
  const __m128i words =
      _mm_packs_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
  std::memcpy(to, &words, sizeof words);
}

struct Added {
  CA_INLINE Floats operator()(Floats x, Floats y) const {
    return bits_as<Floats>(bits_as<Ints>(x) + bits_as<Ints>(y));
  }
  CA_INLINE Floats4 operator()(Floats4 x, Floats4 y) const {
    return bits_as<Floats4>(_mm_add_epi32(bits_as<__m128i>(x), bits_as<__m128i>(y)));
  }
};

// The lanes of each of four vectors, added up.
CA_INLINE Floats4 sums(Ints a, Ints b, Ints c, Ints d) {
  const Floats4 four = joined(bits_as<Floats>(a), bits_as<Floats>(b), bits_as<Floats>(c),
                              bits_as<Floats>(d), Added{});
  return bits_as<Floats4>(_mm_cvtepi32_ps(bits_as<__m128i>(four)));
}

struct InWords {
  using Element = int8_t;
  using Query = float;
  struct Weights {
    int16_t of[kChunk];
    float unit;
  };
  static constexpr bool kInPlace = false;
  static constexpr int kWide = kWords, kKeys = 8, kValues = 8, kRun = kValues;
  static_assert(kLanes % kValues == 0, "weights are settled up to whole vectors");

  CA_INLINE void put(float* scores, Weights&, int64_t i, Floats w) const { store(scores + i, w); }

  void settle(const float* scores, int64_t count, Weights& weights) const {
    const int64_t n = padded<kLanes>(count);
    const Fixed fixed(scores, n);
    for (int64_t i = 0; i < n; i += kLanes) store_words(fixed.integers(scores + i), weights.of + i);
    weights.unit = fixed.unit;
  }

  // What a query becomes, in place, and its unit behind.
  static CA_INLINE const int16_t* words(const float* query) {
    return reinterpret_cast<const int16_t*>(query);
  }

  void arrange(float* query, int64_t dim) const {
    const Fixed fixed(query, dim);
    for (int64_t d = 0; d < dim; d += kLanes)
      store_words(fixed.integers(query + d), const_cast<int16_t*>(words(query)) + d);
    query[dim / 2] = fixed.unit;
  }

  void finish(float*, int64_t) const {}
};

// Adds sixteen elements of two keys, times those of each query.
template <int rows>
CA_INLINE void add_products(const float* query, int64_t dim, const int8_t* const* keys, int64_t d,
                            Ints (*sum)[2]) {
  __m256i key[2];
  for (int i = 0; i < 2; ++i) key[i] = _mm256_cvtepi8_epi16(codes_of(keys[i] + d));
  for (int r = 0; r < rows; ++r) {
    const __m256i words = words_at(InWords::words(query + r * dim) + d);
    for (int i = 0; i < 2; ++i) sum[r][i] = add_words(sum[r][i], key[i], words);
  }
}

// The products that FewRows needs, of two keys at a time.
template <int rows>
CA_INLINE void products(const InWords&, const float* query, int64_t dim, const int8_t* const* keys,
                        float* out, Ahead ahead) {
  for (int k = 0; k < InWords::kKeys; k += 2) {
    Ints sum[rows + rows % 2][2] = {};
    int64_t d = 0;
    for (; d + 2 * kWords <= dim; d += 2 * kWords) {
      prefetch<1>(ahead + k * dim + 2 * d);
      add_products<rows>(query, dim, keys + k, d, sum);
      add_products<rows>(query, dim, keys + k, d + kWords, sum);
    }
    if (d < dim) {
      prefetch<1>(ahead + k * dim + 2 * d);
      add_products<rows>(query, dim, keys + k, d, sum);
    }
    for (int r = 0; r < rows; r += 2) {
      const Floats4 s = sums(sum[r][0], sum[r][1], sum[r + 1][0], sum[r + 1][1]);
      for (int i = 0; i < 2 && r + i < rows; ++i) {
        const float unit = query[(r + i) * dim + dim / 2];
        float* to = out + (r + i) * kChunk + k;
        to[0] = s[2 * i] * unit, to[1] = s[2 * i + 1] * unit;
      }
    }
  }
}

// Adds sixteen elements of two tokens' values, weighted.
template <int rows>
CA_INLINE void add_values(const InWords::Weights* weights, int64_t first,
                          const int8_t* const* values, int64_t d, Ints (*sum)[2]) {
  const __m128i a = codes_of(values[0] + d), b = codes_of(values[1] + d);
  const __m256i two[] = {_mm256_cvtepi8_epi16(_mm_unpacklo_epi8(a, b)),
                         _mm256_cvtepi8_epi16(_mm_unpackhi_epi8(a, b))};
  for (int r = 0; r < rows; ++r) {
    int32_t pair;
    std::memcpy(&pair, weights[r].of + first, sizeof pair);
    for (int w = 0; w < 2; ++w) sum[r][w] = add_words(sum[r][w], two[w], _mm256_set1_epi32(pair));
  }
}

// Sixteen elements at a time: so their sums stay in registers.
template <int rows>
CA_INLINE void weighted_sums(const InWords&, const InWords::Weights* weights, int64_t first,
                             const int8_t* const* values, float* sums, int64_t dim,
                             const Ahead* ahead) {
  for (int64_t d = 0; d < dim; d += kWords) {
    Ints sum[rows][2] = {};
    for (int t = 0; t < InWords::kValues; t += 4) {
      prefetch<1>(*ahead + InWords::kValues * d + t * kWords);
      add_values<rows>(weights, first + t, values + t, d, sum);
      add_values<rows>(weights, first + t + 2, values + t + 2, d, sum);
    }
    for (int r = 0; r < rows; ++r)
      for (int w = 0; w < 2; ++w) {
        float* at = sums + r * dim + d + w * kLanes;
        store(at, load(at) + as_floats(sum[r][w]) * all(weights[r].unit));
      }
  }
}

}  // namespace compiled_attn

#else
#define CA_HAS_WORD_PRODUCTS 0
#endif
