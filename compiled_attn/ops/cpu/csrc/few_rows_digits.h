// Few rows against integers of 8 bits: products of integers.
//
// A query, and the weights of a chunk, become integers of 16 bits in two digits of 8, see `Fixed`. A
// weight is taken times the scale of its token's values, so what is lost is small beside what some
// token of the chunk adds.
#pragma once

#include "few_rows_loops.h"
#include "fixed.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define CA_HAS_INTEGER_DOT 1

namespace compiled_attn {

// 64 integers of 8 bits.
typedef __m512i Octets;

CA_INLINE Octets octets_at(const void* at) { return _mm512_loadu_si512(at); }

// The processor multiplies integers without a sign by ones with a sign: 128 is added here, and
// taken off where sums start.
constexpr int kOffset = kMostCode;
CA_INLINE Octets offset(Octets v) { return _mm512_xor_si512(v, _mm512_set1_epi8(-128)); }

// Adds up products of the four octets of each lane with the four digits at an address.
CA_INLINE Ints add_octets(Ints sum, Octets octets, const int8_t* digits) {
  int32_t four;
  std::memcpy(&four, digits, sizeof four);
  return (Ints)_mm512_dpbusd_epi32((__m512i)sum, octets, _mm512_set1_epi32(four));
}

// high * 256 + low. On the way it may leave 32 bits, and comes back.
CA_INLINE Floats joined_digits(Ints high, Ints low) {
  return as_floats((Ints)_mm512_add_epi32(_mm512_slli_epi32((__m512i)high, 8), (__m512i)low));
}

// kLanes integers as digits: high * 256 + low.
CA_INLINE void store_digits(Ints v, int8_t* high, int8_t* low) {
  const Ints upper = (v + all(128)) >> 8;
  const __m128i bytes[] = {_mm512_cvtepi32_epi8((__m512i)upper),
                           _mm512_cvtepi32_epi8((__m512i)(v - (upper << 8)))};
  std::memcpy(high, &bytes[0], kLanes);
  std::memcpy(low, &bytes[1], kLanes);
}

struct InDigits {
  using Element = int8_t;
  using Query = float;
  struct Weights {
    alignas(64) int8_t high[kChunk], low[kChunk];
    float unit;
    int32_t start;
    int64_t count;  // of them, a multiple of four
  };
  static constexpr bool kInPlace = false;
  static constexpr int kWide = 4 * kLanes, kKeys = kLanes, kValues = kChunk, kRun = 4;

  CA_INLINE void put(float* scores, Weights&, int64_t i, Floats w) const { store(scores + i, w); }

  void settle(const float* scores, int64_t count, Weights& weights) const {
    const int64_t n = padded<kLanes>(count);
    const Fixed fixed(scores, n);
    Ints sum{};
    for (int64_t i = 0; i < n; i += kLanes) {
      const Ints v = fixed.integers(scores + i);
      store_digits(v, weights.high + i, weights.low + i);
      sum += v;
    }
    weights.count = padded<4>(count);
    weights.unit = fixed.unit;
    weights.start = -kOffset * _mm512_reduce_add_epi32((__m512i)sum);
  }

  // What a query becomes, in place: sixteen digits, the lower ones of the same elements, and so on;
  // behind them what its products start from, and its unit.
  static CA_INLINE const int8_t* digits(const float* query, int64_t d) {
    return reinterpret_cast<const int8_t*>(query) + 2 * d;
  }

  void arrange(float* query, int64_t dim) const {
    const Fixed fixed(query, dim);
    Ints sum{};
    for (int64_t d = 0; d < dim; d += kLanes) {
      const Ints v = fixed.integers(query + d);
      int8_t* to = const_cast<int8_t*>(digits(query, d));
      store_digits(v, to, to + kLanes);
      sum += v;
    }
    const int32_t start = -kOffset * _mm512_reduce_add_epi32((__m512i)sum);
    std::memcpy(query + dim / 2, &start, sizeof start);
    query[dim / 2 + 1] = fixed.unit;
  }

  void finish(float* sums, int64_t dim) const { unzip<4>(sums, dim); }
};

// Four tokens become four vectors: of each sixteen elements the first four of each token, the next
// four, and so on.
CA_INLINE void zip_tokens(Octets* v) {
  const Octets a = _mm512_unpacklo_epi32(v[0], v[1]), b = _mm512_unpackhi_epi32(v[0], v[1]);
  const Octets c = _mm512_unpacklo_epi32(v[2], v[3]), d = _mm512_unpackhi_epi32(v[2], v[3]);
  v[0] = _mm512_unpacklo_epi64(a, c), v[1] = _mm512_unpackhi_epi64(a, c);
  v[2] = _mm512_unpacklo_epi64(b, d), v[3] = _mm512_unpackhi_epi64(b, d);
}

// The first quarters of four vectors in a row, the second ones, and so on.
CA_INLINE void zip_quarters(Octets a, Octets b, Octets c, Octets d, Octets (&out)[4]) {
  const Octets ab_low = _mm512_shuffle_i32x4(a, b, 0x44),
               ab_high = _mm512_shuffle_i32x4(a, b, 0xee);
  const Octets cd_low = _mm512_shuffle_i32x4(c, d, 0x44),
               cd_high = _mm512_shuffle_i32x4(c, d, 0xee);
  out[0] = _mm512_shuffle_i32x4(ab_low, cd_low, 0x88);
  out[1] = _mm512_shuffle_i32x4(ab_low, cd_low, 0xdd);
  out[2] = _mm512_shuffle_i32x4(ab_high, cd_high, 0x88);
  out[3] = _mm512_shuffle_i32x4(ab_high, cd_high, 0xdd);
}

// The products that FewRows needs, of kKeys keys.
template <int rows>
CA_INLINE void products(const InDigits& math, const float* query, int64_t dim,
                        const int8_t* const* keys, float* out, Ahead ahead) {
  Ints high[rows] = {}, low[rows];
  for (int r = 0; r < rows; ++r) low[r] = all(bits_as<int32_t>(query[r * dim + dim / 2]));
  for (int64_t d = 0; d < dim; d += math.kWide) {
    Octets zipped[16];  // of tokens 4t to 4t + 3, the elements 4i to 4i + 3 of each sixteen: 4t + i
    for (int t = 0; t < 16; ++t) zipped[t] = octets_at(keys[t] + d);
    for (int t = 0; t < 16; t += 4) zip_tokens(zipped + t);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      Octets fours[4];  // of sixteen tokens, the elements 4i to 4i + 3 of each sixteen
      zip_quarters(zipped[i], zipped[4 + i], zipped[8 + i], zipped[12 + i], fours);
#pragma GCC unroll 4
      for (int quarter = 0; quarter < 4; ++quarter) {
        prefetch<1>(ahead + 16 * d + kLine * (4 * i + quarter));
        asm volatile("" ::: "memory");  // keeps it here: GCC would bring all of them forward
        const Octets four = offset(fours[quarter]);
        for (int r = 0; r < rows; ++r) {
          const int8_t* digits = math.digits(query + r * dim, d + quarter * kLanes) + 4 * i;
          high[r] = add_octets(high[r], four, digits);
          low[r] = add_octets(low[r], four, digits + kLanes);
        }
      }
    }
  }
  for (int r = 0; r < rows; ++r)
    store(out + r * kChunk, joined_digits(high[r], low[r]) * all(query[r * dim + dim / 2 + 1]));
}

// Sums of a chunk, half of each sixteen elements at a time: so all of them stay in registers.
template <int rows>
CA_INLINE void weighted_sums(const InDigits& math, const InDigits::Weights* weights, int64_t,
                             const int8_t* const* values, float* sums, int64_t dim,
                             const Ahead* ahead) {
  static_assert(InDigits::kValues == kChunk, "the first value is the first of its chunk");
  const int64_t count = weights->count;  // the same of all rows
  for (int64_t d = 0; d < dim; d += math.kWide)
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      Ints high[rows][2] = {}, low[rows][2];
      for (int r = 0; r < rows; ++r) low[r][0] = low[r][1] = all(weights[r].start);
      for (int64_t t = 0; t < count; t += 4) {
        prefetch<2>(ahead[t / math.kRun] + 4 * d + half * 2 * kLine);
        Octets two[2], four[2];
        for (int i = 0; i < 2; ++i) {
          const Octets a = octets_at(values[t + 2 * i] + d);
          const Octets b = octets_at(values[t + 2 * i + 1] + d);
          two[i] = half ? _mm512_unpackhi_epi8(a, b) : _mm512_unpacklo_epi8(a, b);
        }
        four[0] = offset(_mm512_unpacklo_epi16(two[0], two[1]));
        four[1] = offset(_mm512_unpackhi_epi16(two[0], two[1]));
        for (int r = 0; r < rows; ++r)
          for (int w = 0; w < 2; ++w) {
            high[r][w] = add_octets(high[r][w], four[w], weights[r].high + t);
            low[r][w] = add_octets(low[r][w], four[w], weights[r].low + t);
          }
      }
      for (int r = 0; r < rows; ++r)
        for (int w = 0; w < 2; ++w) {
          float* at = sums + r * dim + d + (2 * half + w) * kLanes;
          store(at, load(at) + joined_digits(high[r][w], low[r][w]) * all(weights[r].unit));
        }
    }
}

}  // namespace compiled_attn

#else
#define CA_HAS_INTEGER_DOT 0
#endif
