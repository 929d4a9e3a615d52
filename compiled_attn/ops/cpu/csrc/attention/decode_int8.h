// int8 caches under bfloat16 queries: integer products.
//
// Converts the query and the weights of a chunk to 16-bit fixed point. Weights include the scale of
// their token's values, so rounding errors are small next to the largest contribution of the chunk.
#pragma once

#include <algorithm>
#include <cmath>

#include "attention/decode_math.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define CA_HAS_INT8_VNNI 1
#elif defined(__AVX2__) && !defined(__AVX512F__)
#define CA_HAS_INT8_MADD 1
#endif

#if CA_HAS_INT8_VNNI || CA_HAS_INT8_MADD

namespace compiled_attn {

constexpr int kMaxCode = 128;  // magnitude of the smallest int8

// x = i * unit. Any non-finite element makes the unit NaN and the integers arbitrary.
struct FixedPoint {
  float largest, factor, unit;

  // Limits magnitudes so that a sum of n products with codes fits into 32 bits.
  FixedPoint(const float* from, int64_t n)
      : largest(std::min(127 * 256.0f, 2.13e9f / float(kMaxCode * n))) {
    Ints most{};  // magnitudes order like their bits, NaN above all
    for (int64_t i = 0; i < n; i += kLanes)
      most = max(most, bit_cast<Ints>(load(from + i)) & splat(INT32_MAX));
    const float peak = bit_cast<float>(hmax(most));
    factor = peak > 0 ? std::min(largest / peak, 1e38f) : 0;
    unit = peak > 0 ? 1 / factor : peak;
    if (!(peak < INFINITY)) factor = 0, unit = NAN;
  }

  CA_INLINE Ints integers(const float* from) const {
    return round_to_int(max(load(from) * splat(factor), splat(-largest)));
  }
};

#if CA_HAS_INT8_VNNI
// AVX-512 dot products (VNNI). Fixed point is split into a high and a low byte.

typedef __m512i Int8x64;

CA_INLINE Int8x64 load_int8x64(const void* at) { return _mm512_loadu_si512(at); }

// vpdpbusd multiplies unsigned by signed bytes: adds 128 to codes here, and subtracts its share
// where sums start.
constexpr int kOffset = kMaxCode;
CA_INLINE Int8x64 to_unsigned(Int8x64 v) { return _mm512_xor_si512(v, _mm512_set1_epi8(-128)); }

// Adds dot products of four codes a lane with four signed bytes.
CA_INLINE Ints dot_int8(Ints sum, Int8x64 codes, const int8_t* bytes) {
  int32_t four;
  std::memcpy(&four, bytes, sizeof four);
  return (Ints)_mm512_dpbusd_epi32((__m512i)sum, codes, _mm512_set1_epi32(four));
}

// high * 256 + low; wraps around 32 bits and back.
CA_INLINE Floats combine_bytes(Ints high, Ints low) {
  return to_float((Ints)_mm512_add_epi32(_mm512_slli_epi32((__m512i)high, 8), (__m512i)low));
}

// Splits kLanes integers into high * 256 + low.
CA_INLINE void store_bytes(Ints v, int8_t* high, int8_t* low) {
  const Ints upper = (v + splat(128)) >> 8;
  const __m128i bytes[] = {_mm512_cvtepi32_epi8((__m512i)upper),
                           _mm512_cvtepi32_epi8((__m512i)(v - (upper << 8)))};
  std::memcpy(high, &bytes[0], kLanes);
  std::memcpy(low, &bytes[1], kLanes);
}

struct Int8Vnni {
  using Element = int8_t;
  using Query = float;
  struct Weights {
    alignas(64) int8_t high[kChunk], low[kChunk];
    float unit;
    int32_t start;
    int64_t count;  // a multiple of four
  };
  static constexpr bool kInPlace = false;
  static constexpr int kStep = 4 * kLanes, kKeys = kLanes, kValues = kChunk, kRun = 4;

  CA_INLINE void put(float* scores, Weights&, int64_t i, Floats w) const { store(scores + i, w); }

  void settle(const float* scores, int64_t count, Weights& weights) const {
    const int64_t n = padded<kLanes>(count);
    const FixedPoint fixed(scores, n);
    Ints sum{};
    for (int64_t i = 0; i < n; i += kLanes) {
      const Ints v = fixed.integers(scores + i);
      store_bytes(v, weights.high + i, weights.low + i);
      sum += v;
    }
    weights.count = padded<4>(count);
    weights.unit = fixed.unit;
    weights.start = -kOffset * _mm512_reduce_add_epi32((__m512i)sum);
  }

  // The query in place: 16 high bytes, 16 low bytes of the same elements, and so on; then the start
  // of its sums and its unit.
  static CA_INLINE const int8_t* query_bytes(const float* query, int64_t d) {
    return reinterpret_cast<const int8_t*>(query) + 2 * d;
  }

  void arrange(float* query, int64_t dim) const {
    const FixedPoint fixed(query, dim);
    Ints sum{};
    for (int64_t d = 0; d < dim; d += kLanes) {
      const Ints v = fixed.integers(query + d);
      int8_t* to = const_cast<int8_t*>(query_bytes(query, d));
      store_bytes(v, to, to + kLanes);
      sum += v;
    }
    const int32_t start = -kOffset * _mm512_reduce_add_epi32((__m512i)sum);
    std::memcpy(query + dim / 2, &start, sizeof start);
    query[dim / 2 + 1] = fixed.unit;
  }

  void finish(float* sums, int64_t dim) const { unzip<4>(sums, dim); }
};

// Transposes 4 x 4 groups of four bytes within each 128-bit lane of four tokens.
CA_INLINE void zip_tokens(Int8x64* v) {
  const Int8x64 a = _mm512_unpacklo_epi32(v[0], v[1]), b = _mm512_unpackhi_epi32(v[0], v[1]);
  const Int8x64 c = _mm512_unpacklo_epi32(v[2], v[3]), d = _mm512_unpackhi_epi32(v[2], v[3]);
  v[0] = _mm512_unpacklo_epi64(a, c), v[1] = _mm512_unpackhi_epi64(a, c);
  v[2] = _mm512_unpacklo_epi64(b, d), v[3] = _mm512_unpackhi_epi64(b, d);
}

// Gathers the first quarters of four vectors, the second ones, and so on.
CA_INLINE void zip_quarters(Int8x64 a, Int8x64 b, Int8x64 c, Int8x64 d, Int8x64 (&out)[4]) {
  const Int8x64 ab_low = _mm512_shuffle_i32x4(a, b, 0x44),
               ab_high = _mm512_shuffle_i32x4(a, b, 0xee);
  const Int8x64 cd_low = _mm512_shuffle_i32x4(c, d, 0x44),
               cd_high = _mm512_shuffle_i32x4(c, d, 0xee);
  out[0] = _mm512_shuffle_i32x4(ab_low, cd_low, 0x88);
  out[1] = _mm512_shuffle_i32x4(ab_low, cd_low, 0xdd);
  out[2] = _mm512_shuffle_i32x4(ab_high, cd_high, 0x88);
  out[3] = _mm512_shuffle_i32x4(ab_high, cd_high, 0xdd);
}

// Multiplies queries with kKeys keys.
template <int rows>
CA_INLINE void products(const Int8Vnni& math, const float* query, int64_t dim,
                        const int8_t* const* keys, float* out, PrefetchTarget ahead) {
  Ints high[rows] = {}, low[rows];
  for (int r = 0; r < rows; ++r) low[r] = splat(bit_cast<int32_t>(query[r * dim + dim / 2]));
  for (int64_t d = 0; d < dim; d += math.kStep) {
    Int8x64 zipped[16];  // tokens 4t..4t+3, elements 4i..4i+3 of each 16, at 4t + i
    for (int t = 0; t < 16; ++t) zipped[t] = load_int8x64(keys[t] + d);
    for (int t = 0; t < 16; t += 4) zip_tokens(zipped + t);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      Int8x64 fours[4];  // 16 tokens, elements 4i..4i+3 of each 16
      zip_quarters(zipped[i], zipped[4 + i], zipped[8 + i], zipped[12 + i], fours);
#pragma GCC unroll 4
      for (int quarter = 0; quarter < 4; ++quarter) {
        prefetch<1>(ahead + 16 * d + kLine * (4 * i + quarter));
        asm volatile("" ::: "memory");  // stops GCC from hoisting all of them
        const Int8x64 four = to_unsigned(fours[quarter]);
        for (int r = 0; r < rows; ++r) {
          const int8_t* bytes = math.query_bytes(query + r * dim, d + quarter * kLanes) + 4 * i;
          high[r] = dot_int8(high[r], four, bytes);
          low[r] = dot_int8(low[r], four, bytes + kLanes);
        }
      }
    }
  }
  for (int r = 0; r < rows; ++r)
    store(out + r * kChunk, combine_bytes(high[r], low[r]) * splat(query[r * dim + dim / 2 + 1]));
}

// Sums a chunk in two halves of each 16 elements, so that all sums stay in registers.
template <int rows>
CA_INLINE void weighted_sums(const Int8Vnni& math, const Int8Vnni::Weights* weights, int64_t,
                             const int8_t* const* values, float* sums, int64_t dim,
                             const PrefetchTarget* ahead) {
  static_assert(Int8Vnni::kValues == kChunk, "the first value is the first of its chunk");
  const int64_t count = weights->count;  // equal for all rows
  for (int64_t d = 0; d < dim; d += math.kStep)
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      Ints high[rows][2] = {}, low[rows][2];
      for (int r = 0; r < rows; ++r) low[r][0] = low[r][1] = splat(weights[r].start);
      for (int64_t t = 0; t < count; t += 4) {
        prefetch<2>(ahead[t / math.kRun] + 4 * d + half * 2 * kLine);
        Int8x64 two[2], four[2];
        for (int i = 0; i < 2; ++i) {
          const Int8x64 a = load_int8x64(values[t + 2 * i] + d);
          const Int8x64 b = load_int8x64(values[t + 2 * i + 1] + d);
          two[i] = half ? _mm512_unpackhi_epi8(a, b) : _mm512_unpacklo_epi8(a, b);
        }
        four[0] = to_unsigned(_mm512_unpacklo_epi16(two[0], two[1]));
        four[1] = to_unsigned(_mm512_unpackhi_epi16(two[0], two[1]));
        for (int r = 0; r < rows; ++r)
          for (int w = 0; w < 2; ++w) {
            high[r][w] = dot_int8(high[r][w], four[w], weights[r].high + t);
            low[r][w] = dot_int8(low[r][w], four[w], weights[r].low + t);
          }
      }
      for (int r = 0; r < rows; ++r)
        for (int w = 0; w < 2; ++w) {
          float* at = sums + r * dim + d + (2 * half + w) * kLanes;
          store(at, load(at) + combine_bytes(high[r][w], low[r][w]) * splat(weights[r].unit));
        }
    }
}

#else
// AVX2 16-bit multiply-add (`vpmaddwd`), which adds two adjacent products: two elements of a key,
// or the values of two tokens. Widens codes to 16 bits.

constexpr int kInt16s = 16;  // integers of 16 bits in a vector

CA_INLINE __m128i load_int8x16(const int8_t* at) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
}

CA_INLINE __m256i load_int16x16(const int16_t* at) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
}

CA_INLINE Ints madd_int16(Ints sum, __m256i a, __m256i b) {
  return sum + bit_cast<Ints>(_mm256_madd_epi16(a, b));
}

CA_INLINE void store_int16(Ints v, int16_t* to) {
  const __m128i words =
      _mm_packs_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
  std::memcpy(to, &words, sizeof words);
}

struct AddInt32 {
  CA_INLINE Floats operator()(Floats x, Floats y) const {
    return bit_cast<Floats>(bit_cast<Ints>(x) + bit_cast<Ints>(y));
  }
  CA_INLINE Floats4 operator()(Floats4 x, Floats4 y) const {
    return bit_cast<Floats4>(_mm_add_epi32(bit_cast<__m128i>(x), bit_cast<__m128i>(y)));
  }
};

// Sums the lanes of each of four vectors.
CA_INLINE Floats4 hsum(Ints a, Ints b, Ints c, Ints d) {
  const Floats4 four = hreduce(bit_cast<Floats>(a), bit_cast<Floats>(b), bit_cast<Floats>(c),
                              bit_cast<Floats>(d), AddInt32{});
  return bit_cast<Floats4>(_mm_cvtepi32_ps(bit_cast<__m128i>(four)));
}

struct Int8Madd {
  using Element = int8_t;
  using Query = float;
  struct Weights {
    int16_t of[kChunk];
    float unit;
  };
  static constexpr bool kInPlace = false;
  static constexpr int kStep = kInt16s, kKeys = 8, kValues = 8, kRun = kValues;
  static_assert(kLanes % kValues == 0, "weights are settled up to whole vectors");

  CA_INLINE void put(float* scores, Weights&, int64_t i, Floats w) const { store(scores + i, w); }

  void settle(const float* scores, int64_t count, Weights& weights) const {
    const int64_t n = padded<kLanes>(count);
    const FixedPoint fixed(scores, n);
    for (int64_t i = 0; i < n; i += kLanes) store_int16(fixed.integers(scores + i), weights.of + i);
    weights.unit = fixed.unit;
  }

  // The query in fixed point, stored in place, followed by its unit.
  static CA_INLINE const int16_t* words(const float* query) {
    return reinterpret_cast<const int16_t*>(query);
  }

  void arrange(float* query, int64_t dim) const {
    const FixedPoint fixed(query, dim);
    for (int64_t d = 0; d < dim; d += kLanes)
      store_int16(fixed.integers(query + d), const_cast<int16_t*>(words(query)) + d);
    query[dim / 2] = fixed.unit;
  }

  void finish(float*, int64_t) const {}
};

// Adds products of 16 elements of two keys with each query.
template <int rows>
CA_INLINE void add_key_products(const float* query, int64_t dim, const int8_t* const* keys,
                                int64_t d, Ints (*sum)[2]) {
  __m256i key[2];
  for (int i = 0; i < 2; ++i) key[i] = _mm256_cvtepi8_epi16(load_int8x16(keys[i] + d));
  for (int r = 0; r < rows; ++r) {
    const __m256i words = load_int16x16(Int8Madd::words(query + r * dim) + d);
    for (int i = 0; i < 2; ++i) sum[r][i] = madd_int16(sum[r][i], key[i], words);
  }
}

// Multiplies queries with keys, two keys at a time.
template <int rows>
CA_INLINE void products(const Int8Madd&, const float* query, int64_t dim, const int8_t* const* keys,
                        float* out, PrefetchTarget ahead) {
  for (int k = 0; k < Int8Madd::kKeys; k += 2) {
    Ints sum[rows + rows % 2][2] = {};
    int64_t d = 0;
    for (; d + 2 * kInt16s <= dim; d += 2 * kInt16s) {
      prefetch<1>(ahead + k * dim + 2 * d);
      add_key_products<rows>(query, dim, keys + k, d, sum);
      add_key_products<rows>(query, dim, keys + k, d + kInt16s, sum);
    }
    if (d < dim) {
      prefetch<1>(ahead + k * dim + 2 * d);
      add_key_products<rows>(query, dim, keys + k, d, sum);
    }
    for (int r = 0; r < rows; r += 2) {
      const Floats4 s = hsum(sum[r][0], sum[r][1], sum[r + 1][0], sum[r + 1][1]);
      for (int i = 0; i < 2 && r + i < rows; ++i) {
        const float unit = query[(r + i) * dim + dim / 2];
        float* to = out + (r + i) * kChunk + k;
        to[0] = s[2 * i] * unit, to[1] = s[2 * i + 1] * unit;
      }
    }
  }
}

// Adds 16 elements of two tokens' weighted values.
template <int rows>
CA_INLINE void add_values(const Int8Madd::Weights* weights, int64_t first,
                          const int8_t* const* values, int64_t d, Ints (*sum)[2]) {
  const __m128i a = load_int8x16(values[0] + d), b = load_int8x16(values[1] + d);
  const __m256i two[] = {_mm256_cvtepi8_epi16(_mm_unpacklo_epi8(a, b)),
                         _mm256_cvtepi8_epi16(_mm_unpackhi_epi8(a, b))};
  for (int r = 0; r < rows; ++r) {
    int32_t pair;
    std::memcpy(&pair, weights[r].of + first, sizeof pair);
    for (int w = 0; w < 2; ++w) sum[r][w] = madd_int16(sum[r][w], two[w], _mm256_set1_epi32(pair));
  }
}

// Takes 16 elements at a time, so that sums stay in registers.
template <int rows>
CA_INLINE void weighted_sums(const Int8Madd&, const Int8Madd::Weights* weights, int64_t first,
                             const int8_t* const* values, float* sums, int64_t dim,
                             const PrefetchTarget* ahead) {
  for (int64_t d = 0; d < dim; d += kInt16s) {
    Ints sum[rows][2] = {};
    for (int t = 0; t < Int8Madd::kValues; t += 4) {
      prefetch<1>(*ahead + Int8Madd::kValues * d + t * kInt16s);
      add_values<rows>(weights, first + t, values + t, d, sum);
      add_values<rows>(weights, first + t + 2, values + t + 2, d, sum);
    }
    for (int r = 0; r < rows; ++r)
      for (int w = 0; w < 2; ++w) {
        float* at = sums + r * dim + d + w * kLanes;
        store(at, load(at) + to_float(sum[r][w]) * splat(weights[r].unit));
      }
  }
}

#endif

}  // namespace compiled_attn

#endif
