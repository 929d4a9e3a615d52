// Values that are NaN or infinite, kept from rows that do not see them.
//
// What a row does not see weighs 0, and 0 * NaN is NaN. Sums of finite values need no care; where
// they come out otherwise and rows of a part see different keys, the part is taken again: then such
// values are read as zeros, and the scores of their keys are NaN, which a mask hides.
#pragma once

#include <algorithm>
#include <cmath>

#include "elements.h"
#include "part.h"

namespace compiled_attn {

// The tokens of a chunk whose values are not finite, of some KV heads: [heads, Capacity].
template <class Element, int Capacity>
class Spoilt {
 public:
  void take(Scratch& scratch, int64_t heads, int64_t dim) {
    scratch.take(is_spoilt_, heads * Capacity);
    scratch.take(zeros_, dim);
    std::fill_n(zeros_, dim, Element{});
  }

  // Whether they are looked for; else there are none.
  bool wanted = false;

  // Those of the heads [begin, end).
  void find(const PagedAttentionArgs& args, int64_t begin, int64_t end,
            const Chunk<Capacity>& chunk) {
    if (!wanted) return;
    const auto* values = static_cast<const Element*>(args.value_cache.data);
    const auto* scales = static_cast<const float*>(args.value_scale.data);
    for (int64_t h = begin; h < end; ++h)
      for (int t = 0; t < Capacity; ++t) {
        const Element* row = values + chunk.value[t] + h * args.value_cache.head;
        is_spoilt_[(h - begin) * Capacity + t] =
            !is_finite(row, args.value_dim) ||
            (scales && !std::isfinite(scales[chunk.value_scale[t] + h * args.value_scale.head]));
      }
  }

  CA_INLINE bool is_spoilt(int64_t h, int64_t t) const {
    return wanted && is_spoilt_[h * Capacity + t];
  }

  // A value, or zeros for one that is spoilt.
  CA_INLINE const Element* value(const Element* row, int64_t h, int64_t t) const {
    return is_spoilt(h, t) ? zeros_ : row;
  }

  // Overwrites what belongs to spoilt tokens: scores, or scales.
  void put(float* of_tokens, int64_t h, float x) const {
    if (!wanted) return;
    for (int t = 0; t < Capacity; ++t)
      if (is_spoilt_[h * Capacity + t]) of_tokens[t] = x;
  }

 private:
  bool* is_spoilt_;
  Element* zeros_;
};

// Of [n] sums, a multiple of kLanes; several at a time, as each waits for the one before.
inline bool all_finite(const float* sums, int64_t n) {
  constexpr int kAtOnce = 4;
  Floats zero[kAtOnce] = {};
  int64_t i = 0;
  for (; i + kAtOnce * kLanes <= n; i += kAtOnce * kLanes)
    for (int w = 0; w < kAtOnce; ++w) zero[w] += load(sums + i + w * kLanes) * all(0.0f);
  for (; i < n; i += kLanes) zero[0] += load(sums + i) * all(0.0f);
  const Floats4 four = compiled_attn::sums(zero[0], zero[1], zero[2], zero[3]);
  return four[0] + four[1] + four[2] + four[3] == 0;  // 0 times what is not finite is NaN
}

}  // namespace compiled_attn
