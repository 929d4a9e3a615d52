// Element types of the decode kernel: how it multiplies queries with keys and weights with values.
//
// Each policy defines the types of queries and weights, the elements of a key per step (kStep), the
// tokens per step over values (kTokensPerStep), and the tokens processed together: kKeys in
// products, kValues between loads and stores of sums. More means less work; fewer keeps to address
// order, in which memory arrives. Values are prefetched in runs of kRun rows.
//
// `put` stores weights from the i-th on, `settle` finishes all `count`; until then they may be in
// place of the scores.
#pragma once

#include <algorithm>
#include <type_traits>

#include "attention/prefetch.h"
#include "attention/scores.h"
#include "vector/bfloat16.h"

namespace compiled_attn {

constexpr int kChunk = 64;  // tokens

static_assert(kChunk % kLanes == 0, "a chunk is whole vectors");

// Restores element order after zipping: consecutive vectors of sums each hold four elements of
// every 4 * vectors.
template <int vectors>
inline void unzip(float* sums, int64_t dim) {
  constexpr int kTogether = vectors * kLanes;
  for (float* at = sums; at < sums + dim; at += kTogether) {
    float old[kTogether];
    std::copy_n(at, kTogether, old);
    for (int quarter = 0; quarter < kLanes / 4; ++quarter)
      for (int vector = 0; vector < vectors; ++vector)
        std::memcpy(at + (quarter * vectors + vector) * 4, old + vector * kLanes + quarter * 4,
                    4 * sizeof(float));
  }
}

// Splits two vectors into even and odd elements, and back.
template <int Parity>
struct Deinterleave {
  static constexpr int at(int i) { return 2 * i + Parity; }
};
template <int Half>
struct Interleave {
  static constexpr int at(int i) { return Half * kLanes / 2 + i / 2 + i % 2 * kLanes; }
};
CA_INLINE void deinterleave(Floats a, Floats b, float* evens, float* odds) {
  store(evens, shuffle<Deinterleave<0>>(a, b));
  store(odds, shuffle<Deinterleave<1>>(a, b));
}
CA_INLINE void interleave(Floats evens, Floats odds, float* to) {
  store(to, shuffle<Interleave<0>>(evens, odds));
  store(to + kLanes, shuffle<Interleave<1>>(evens, odds));
}

// Weights stored unchanged.
template <class Weight>
struct PlainWeights {
  struct Weights {
    Weight of[kChunk];
  };
  static constexpr bool kInPlace = std::is_same_v<Weight, float>;  // overwrites the scores

  CA_INLINE void put(float*, Weights& weights, int64_t i, Floats w) const {
    store(weights.of + i, w);
  }
  void settle(const float*, int64_t, Weights&) const {}

  CA_INLINE Floats weight(const float* at) const { return splat(*at); }
  CA_INLINE Floats weighted(Floats sum, Floats value, Floats weight) const {
    return sum + value * weight;
  }
#if CA_HAS_BF16_DOT
  CA_INLINE BFloat16x2 weight(const BFloat16* at) const { return broadcast_bf16x2(at); }
  CA_INLINE Floats weighted(Floats sum, BFloat16x2 value, BFloat16x2 weight) const {
    return dot_bf16(sum, value, weight);
  }
#endif
};

// Any element type, computed in float32.
template <class Element_>
struct Float32Fma : PlainWeights<float> {
  using Element = Element_;
  using Query = float;
  using Key = Floats;
  using Value = Floats;
  static constexpr int kStep = kLanes, kTokensPerStep = 1;
  static constexpr int kKeys = sizeof(Element) > 1 ? 2 : 4, kValues = 2 * kKeys, kRun = kValues;

  CA_INLINE Floats key(const Element* at) const { return in_register(load(at)); }
  CA_INLINE Floats query(const float* at) const { return load(at); }
  CA_INLINE Floats product(Floats sum, Floats key, Floats query) const { return sum + key * query; }

  template <int width>
  CA_INLINE void values(const Element* const* tokens, Floats (&out)[width]) const {
    for (int w = 0; w < width; ++w) out[w] = in_register(load(tokens[0] + w * kLanes));
  }

  // Reorders a query to match keys.
  void arrange(float*, int64_t) const {}
  // Restores the element order of sums.
  void finish(float*, int64_t) const {}
};

// bfloat16 widened by shift and mask: of two adjacent elements the upper half is a float32 in place
// and the lower becomes one by a shift. Queries and sums hold the even elements of each vector
// first, then the odd ones.
struct Bf16Widen : PlainWeights<float> {
  using Element = BFloat16;
  using Query = float;
  struct Key {
    Floats even, odd;
  };
  using Value = Floats;
  static constexpr int kStep = 2 * kLanes, kTokensPerStep = 1;
  static constexpr int kKeys = 2, kValues = 4, kRun = kValues;

  CA_INLINE Key key(const BFloat16* at) const {
    const Ints both = load_as<Ints>(at);
    return {in_register(bit_cast<Floats>(both << 16)),
            in_register(bit_cast<Floats>(both & int32_t(0xffff0000)))};
  }
  CA_INLINE Key query(const float* at) const { return {load(at), load(at + kLanes)}; }
  CA_INLINE Floats product(Floats sum, Key key, Key query) const {
    return sum + key.even * query.even + key.odd * query.odd;
  }

  template <int width>
  CA_INLINE void values(const BFloat16* const* tokens, Floats (&out)[width]) const {
    static_assert(width % 2 == 0, "even ones and odd ones");
    for (int w = 0; w < width; w += 2) {
      const Key both = key(tokens[0] + w * kLanes);
      out[w] = both.even, out[w + 1] = both.odd;
    }
  }

  void arrange(float* query, int64_t dim) const {
    for (float* at = query; at < query + dim; at += kStep)
      deinterleave(load(at), load(at + kLanes), at, at + kLanes);
  }
  void finish(float* sums, int64_t dim) const {
    for (float* at = sums; at < sums + dim; at += kStep)
      interleave(load(at), load(at + kLanes), at);
  }
};

#if CA_HAS_BF16_DOT

// AVX512_BF16 dot products, accumulated in float32.
struct Bf16Dot : PlainWeights<BFloat16> {
  using Element = BFloat16;
  using Query = BFloat16;
  using Key = BFloat16x2;
  using Value = BFloat16x2;
  static constexpr int kStep = 2 * kLanes, kTokensPerStep = 2;
  static constexpr int kKeys = 2, kValues = 8, kRun = kValues;

  CA_INLINE BFloat16x2 key(const BFloat16* at) const { return in_register(load_bf16x2(at)); }
  CA_INLINE BFloat16x2 query(const BFloat16* at) const { return load_bf16x2(at); }
  CA_INLINE Floats product(Floats sum, BFloat16x2 key, BFloat16x2 query) const {
    return dot_bf16(sum, key, query);
  }

  // Zips two tokens; elements stay in zipped order.
  template <int width>
  CA_INLINE void values(const BFloat16* const* tokens, BFloat16x2 (&out)[width]) const {
    for (int w = 0; w < width; w += 2)
      zip(load_bf16x2(tokens[0] + w * kLanes), load_bf16x2(tokens[1] + w * kLanes), out[w],
          out[w + 1]);
  }

  void arrange(BFloat16*, int64_t) const {}
  void finish(float* sums, int64_t dim) const { unzip<2>(sums, dim); }
};

#endif
#if CA_HAS_BF16_DOT && defined(__AVX512VBMI__)
#define CA_HAS_FP8_TABLES 1

typedef __m512i Fp8x64;

CA_INLINE Fp8x64 load_fp8x64(const void* at) { return _mm512_loadu_si512(at); }

// Interleaves a and b: low holds elements 0-7 of each 16, high 8-15.
CA_INLINE void zip_fp8(Fp8x64 a, Fp8x64 b, Fp8x64& low, Fp8x64& high) {
  low = _mm512_unpacklo_epi8(a, b);
  high = _mm512_unpackhi_epi8(a, b);
}

// bfloat16 represents fp8 exactly: tables hold the low and high bytes for the 128 magnitudes.
template <class Element>
class Fp8Tables {
 public:
  Fp8Tables() {
    for (int code = 0; code < 128; ++code) {
      Element element;
      std::memcpy(&element, &code, 1);
      const uint32_t bits = float_bits(element_to_float(element)) >> 16;
      reinterpret_cast<uint8_t*>(low_)[code] = uint8_t(bits);
      reinterpret_cast<uint8_t*>(high_)[code] = uint8_t(bits >> 8);
    }
  }

  // first: elements 0-7 of each 16; second: 8-15
  CA_INLINE void look_up(Fp8x64 codes, BFloat16x2& first, BFloat16x2& second) const {
    const Fp8x64 low = _mm512_permutex2var_epi8(low_[0], codes, low_[1]);
    Fp8x64 high = _mm512_permutex2var_epi8(high_[0], codes, high_[1]);
    const Fp8x64 sign = _mm512_set1_epi8(-128);
    high = _mm512_ternarylogic_epi32(high, codes, sign, 0xf8);  // high | (codes & sign)
    first = _mm512_unpacklo_epi8(low, high);
    second = _mm512_unpackhi_epi8(low, high);
  }

 private:
  Fp8x64 low_[2], high_[2];
};

// fp8 converted to bfloat16 by table lookup, then bf16 dot products.
template <class Element_>
struct Fp8Table : PlainWeights<BFloat16> {
  using Element = Element_;
  using Query = BFloat16;
  struct Key {
    BFloat16x2 first, second;
  };
  using Value = BFloat16x2;
  static constexpr int kStep = 4 * kLanes, kTokensPerStep = 2;
  static constexpr int kKeys = 4, kValues = 32, kRun = kValues;

  CA_INLINE Key key(const Element* at) const {
    Key key;
    tables.look_up(load_fp8x64(at), key.first, key.second);
    return key;
  }
  CA_INLINE Key query(const BFloat16* at) const {
    return {load_bf16x2(at), load_bf16x2(at + 2 * kLanes)};
  }
  CA_INLINE Floats product(Floats sum, Key key, Key query) const {
    return dot_bf16(dot_bf16(sum, key.first, query.first), key.second, query.second);
  }

  template <int width>
  CA_INLINE void values(const Element* const* tokens, BFloat16x2 (&out)[width]) const {
    static_assert(width == 4, "a step takes 64 elements");
    Fp8x64 low, high;
    zip_fp8(load_fp8x64(tokens[0]), load_fp8x64(tokens[1]), low, high);
    tables.look_up(low, out[0], out[1]);
    tables.look_up(high, out[2], out[3]);
  }

  void arrange(BFloat16* query, int64_t dim) const {
    for (int64_t d = 0; d < dim; d += kStep) {
      BFloat16 old[kStep];
      std::copy_n(query + d, kStep, old);
      for (int eight = 0; eight < kStep / 8; ++eight)
        std::memcpy(query + d + eight % 2 * 32 + eight / 2 * 8, old + eight * 8,
                    8 * sizeof(BFloat16));
    }
  }
  void finish(float* sums, int64_t dim) const { unzip<4>(sums, dim); }

  Fp8Tables<Element> tables;
};

#else
#define CA_HAS_FP8_TABLES 0
#endif

// Cache lines filled by some elements, at least 1.
template <class Math>
constexpr int lines_of(int elements) {
  return std::max<int>(elements * sizeof(typename Math::Element) / kLine, 1);
}

// Multiplies `rows` queries [rows, dim] with kKeys keys -> out [rows, kChunk].
//
// Prefetches as many lines as it reads in each step: a burst would delay the loads in the miss
// queue.
template <int rows, class Math>
CA_INLINE void products(const Math& math, const typename Math::Query* query, int64_t dim,
                        const typename Math::Element* const* keys, float* out,
                        PrefetchTarget ahead) {
  constexpr int count = Math::kKeys, at_once = 4 / count;  // rows per vector of sums
  static_assert(4 % count == 0, "a vector of sums is whole rows");
  Floats sum[padded<at_once>(rows) * count] = {};
  for (int64_t d = 0; d < dim; d += Math::kStep) {
    prefetch<lines_of<Math>(count * Math::kStep)>(ahead +
                                                  count * d * sizeof(typename Math::Element));
    typename Math::Key key[count];
    for (int i = 0; i < count; ++i) key[i] = math.key(keys[i] + d);
    for (int r = 0; r < rows; ++r) {
      const auto q = math.query(query + r * dim + d);
      for (int i = 0; i < count; ++i)
        sum[r * count + i] = math.product(sum[r * count + i], key[i], q);
    }
  }
  for (int r = 0; r < rows; r += at_once) {
    const Floats* four = sum + r * count;
    const Floats4 s = hsum(four[0], four[1], four[2], four[3]);
    for (int i = 0; i < at_once && r + i < rows; ++i)
      std::memcpy(out + (r + i) * kChunk, reinterpret_cast<const float*>(&s) + i * count,
                  count * sizeof(float));
  }
}

// Adds kValues weighted values to `width` vectors of each row of sums [rows, dim].
template <int rows, int width, class Math>
CA_INLINE void add_slice(const Math& math, const typename Math::Weights* weights, int64_t first,
                         const typename Math::Element* const* values, int64_t d, float* sums,
                         int64_t dim, PrefetchTarget ahead) {
  using Element = typename Math::Element;
  constexpr int step = Math::kTokensPerStep * width * kLanes;  // elements
  Floats sum[rows][width];
  for (int r = 0; r < rows; ++r)
    for (int w = 0; w < width; ++w) sum[r][w] = load(sums + r * dim + d + w * kLanes);
  for (int t = 0; t < Math::kValues; t += Math::kTokensPerStep) {
    prefetch<lines_of<Math>(step)>(ahead + t / Math::kTokensPerStep * step * sizeof(Element));
    const Element* tokens[Math::kTokensPerStep];
    for (int i = 0; i < Math::kTokensPerStep; ++i) tokens[i] = values[t + i] + d;
    typename Math::Value value[width];
    math.values(tokens, value);
    for (int r = 0; r < rows; ++r) {
      const auto weight = math.weight(weights[r].of + first + t);
      for (int w = 0; w < width; ++w) sum[r][w] = math.weighted(sum[r][w], value[w], weight);
    }
  }
  for (int r = 0; r < rows; ++r)
    for (int w = 0; w < width; ++w) store(sums + r * dim + d + w * kLanes, sum[r][w]);
}

// Adds weighted values to whole rows; `first` is their index in the chunk.
template <int rows, class Math>
CA_INLINE void weighted_sums(const Math& math, const typename Math::Weights* weights, int64_t first,
                             const typename Math::Element* const* values, float* sums, int64_t dim,
                             const PrefetchTarget* ahead) {
  static_assert(Math::kRun == Math::kValues, "one run");
  static_assert(kScoreStep % Math::kValues == 0, "weights are zero up to a score step only");
  constexpr int step = Math::kStep / kLanes, width = kRegisters == 32 ? 4 : 2;
  int64_t d = 0;
  for (; d + width * kLanes <= dim; d += width * kLanes)
    add_slice<rows, width>(math, weights, first, values, d, sums, dim,
                           *ahead + Math::kValues * d * sizeof(typename Math::Element));
  for (; d < dim; d += step * kLanes)
    add_slice<rows, step>(math, weights, first, values, d, sums, dim,
                          *ahead + Math::kValues * d * sizeof(typename Math::Element));
}

}  // namespace compiled_attn
