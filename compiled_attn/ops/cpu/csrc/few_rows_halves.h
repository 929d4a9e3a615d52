// Few rows against bfloat16, in float32.
//
// Of two numbers that lie side by side, the second is a float where it lies, but for the bits of the
// first, and the first is one after a shift: nothing is widened, as that takes as long as products.
// So queries and sums have the even elements of each vector of numbers first, then the odd ones.
#pragma once

#include "few_rows_math.h"

namespace compiled_attn {

struct InHalves : PlainWeights<float> {
  using Element = BFloat16;
  using Query = float;
  struct Key {
    Floats even, odd;
  };
  using Value = Floats;
  static constexpr int kWide = 2 * kLanes, kTokens = 1, kKeys = 2, kValues = 4, kRun = kValues;

  CA_INLINE Key key(const BFloat16* at) const {
    const Ints both = load_as<Ints>(at);
    return {held(bits_as<Floats>(both << 16)), held(bits_as<Floats>(both & int32_t(0xffff0000)))};
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
  CA_INLINE Floats weight(const float* at) const { return all(*at); }
  CA_INLINE Floats weighted(Floats sum, Floats value, Floats weight) const {
    return sum + value * weight;
  }

  void arrange(float* query, int64_t dim) const {
    for (float* at = query; at < query + dim; at += kWide)
      evens_first(load(at), load(at + kLanes), at, at + kLanes);
  }
  void finish(float* sums, int64_t dim) const {
    for (float* at = sums; at < sums + dim; at += kWide) in_turns(load(at), load(at + kLanes), at);
  }
};

}  // namespace compiled_attn
