// How queries meet keys and weights meet values where rows are few.
//
// Each way names what a query and the weights of a chunk are kept as, how many elements of a key
// one step takes (kWide), how many tokens one step over values takes (kTokens), and how many tokens
// are taken together: kKeys of them for products, kValues between loads and stores of the sums.
// Many are less work; few are read in the order of their addresses, which is the order they arrive
// in. What lies ahead of values is asked for in runs of kRun rows.
//
// Weights of a row are put from the i-th on, some at a time, then all `count` of them are settled;
// until then they may be kept where the scores were.
#pragma once

#include <algorithm>
#include <type_traits>

#include "bfloat16_dot.h"
#include "code_tables.h"
#include "elements.h"

namespace compiled_attn {

constexpr int kChunk = 64;  // tokens

static_assert(kChunk % kLanes == 0, "a chunk is whole vectors");

// Undoes what zipping does to the order of elements: `vectors` of sums in a row hold four elements
// of every 4 * vectors in turn.
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

// The even lanes of two vectors in a row, then the odd ones; and back.
template <int Parity>
struct EveryOther {
  static constexpr int at(int i) { return 2 * i + Parity; }
};
template <int Half>
struct InTurns {
  static constexpr int at(int i) { return Half * kLanes / 2 + i / 2 + i % 2 * kLanes; }
};
CA_INLINE void evens_first(Floats a, Floats b, float* evens, float* odds) {
  store(evens, shuffled<EveryOther<0>>(a, b));
  store(odds, shuffled<EveryOther<1>>(a, b));
}
CA_INLINE void in_turns(Floats evens, Floats odds, float* to) {
  store(to, shuffled<InTurns<0>>(evens, odds));
  store(to + kLanes, shuffled<InTurns<1>>(evens, odds));
}

// Weights as they are.
template <class Weight>
struct PlainWeights {
  struct Weights {
    Weight of[kChunk];
  };
  static constexpr bool kInPlace = std::is_same_v<Weight, float>;  // where the scores were

  CA_INLINE void put(float*, Weights& weights, int64_t i, Floats w) const {
    store(weights.of + i, w);
  }
  void settle(const float*, int64_t, Weights&) const {}
};

// Elements of any type, in float32.
template <class Element_>
struct InFloats : PlainWeights<float> {
  using Element = Element_;
  using Query = float;
  using Key = Floats;
  using Value = Floats;
  static constexpr int kWide = kLanes, kTokens = 1;
  static constexpr int kKeys = sizeof(Element) > 1 ? 2 : 4, kValues = 2 * kKeys, kRun = kValues;

  CA_INLINE Floats key(const Element* at) const { return held(load(at)); }
  CA_INLINE Floats query(const float* at) const { return load(at); }
  CA_INLINE Floats product(Floats sum, Floats key, Floats query) const { return sum + key * query; }

  template <int width>
  CA_INLINE void values(const Element* const* tokens, Floats (&out)[width]) const {
    for (int w = 0; w < width; ++w) out[w] = held(load(tokens[0] + w * kLanes));
  }
  CA_INLINE Floats weight(const float* at) const { return all(*at); }
  CA_INLINE Floats weighted(Floats sum, Floats value, Floats weight) const {
    return sum + value * weight;
  }

  // A query in the order that keys are taken in.
  void arrange(float*, int64_t) const {}
  // Sums in the order of elements.
  void finish(float*, int64_t) const {}
};

#if CA_HAS_BFLOAT16_DOT

// Products of pairs of bfloat16 that are added up in float32.
struct InPairs : PlainWeights<BFloat16> {
  using Element = BFloat16;
  using Query = BFloat16;
  using Key = Pairs;
  using Value = Pairs;
  static constexpr int kWide = 2 * kLanes, kTokens = 2, kKeys = 2, kValues = 8, kRun = kValues;

  CA_INLINE Pairs key(const BFloat16* at) const { return held(pairs_at(at)); }
  CA_INLINE Pairs query(const BFloat16* at) const { return pairs_at(at); }
  CA_INLINE Floats product(Floats sum, Pairs key, Pairs query) const {
    return add_products(sum, key, query);
  }

  // Two tokens zipped, elements in the order that zipping leaves them in.
  template <int width>
  CA_INLINE void values(const BFloat16* const* tokens, Pairs (&out)[width]) const {
    for (int w = 0; w < width; w += 2)
      zip(pairs_at(tokens[0] + w * kLanes), pairs_at(tokens[1] + w * kLanes), out[w], out[w + 1]);
  }
  CA_INLINE Pairs weight(const BFloat16* at) const { return same_pair(at); }
  CA_INLINE Floats weighted(Floats sum, Pairs value, Pairs weight) const {
    return add_products(sum, value, weight);
  }

  void arrange(BFloat16*, int64_t) const {}
  void finish(float* sums, int64_t dim) const { unzip<2>(sums, dim); }
};

#endif
#if CA_HAS_CODE_TABLES

// Floats of 8 bits as bfloat16, then the same.
template <class Element_>
struct InCodes : PlainWeights<BFloat16> {
  using Element = Element_;
  using Query = BFloat16;
  struct Key {
    Pairs first, second;
  };
  using Value = Pairs;
  static constexpr int kWide = 4 * kLanes, kTokens = 2, kKeys = 4, kValues = 32, kRun = kValues;

  CA_INLINE Key key(const Element* at) const {
    Key key;
    tables.look_up(codes_at(at), key.first, key.second);
    return key;
  }
  CA_INLINE Key query(const BFloat16* at) const {
    return {pairs_at(at), pairs_at(at + 2 * kLanes)};
  }
  CA_INLINE Floats product(Floats sum, Key key, Key query) const {
    return add_products(add_products(sum, key.first, query.first), key.second, query.second);
  }

  template <int width>
  CA_INLINE void values(const Element* const* tokens, Pairs (&out)[width]) const {
    static_assert(width == 4, "a step takes 64 elements");
    Codes low, high;
    zip_codes(codes_at(tokens[0]), codes_at(tokens[1]), low, high);
    tables.look_up(low, out[0], out[1]);
    tables.look_up(high, out[2], out[3]);
  }
  CA_INLINE Pairs weight(const BFloat16* at) const { return same_pair(at); }
  CA_INLINE Floats weighted(Floats sum, Pairs value, Pairs weight) const {
    return add_products(sum, value, weight);
  }

  void arrange(BFloat16* query, int64_t dim) const {
    for (int64_t d = 0; d < dim; d += kWide) {
      BFloat16 old[kWide];
      std::copy_n(query + d, kWide, old);
      for (int eight = 0; eight < kWide / 8; ++eight)
        std::memcpy(query + d + eight % 2 * 32 + eight / 2 * 8, old + eight * 8,
                    8 * sizeof(BFloat16));
    }
  }
  void finish(float* sums, int64_t dim) const { unzip<4>(sums, dim); }

  CodeTables<Element> tables;
};

#endif

}  // namespace compiled_attn
