// Keeps NaN and infinite values away from rows that do not see them.
//
// A masked key has weight 0, and 0 * NaN is NaN. The first pass assumes finite values. If sums are
// not finite and rows of the part see different keys, a second pass reads such values as zeros and
// gives their keys NaN scores, which the mask hides.
#pragma once

#include <algorithm>
#include <cmath>

#include "attention/request.h"
#include "scratch.h"
#include "vector/elements.h"

namespace compiled_attn {

// Marks tokens of a chunk with non-finite values: [heads, Capacity].
template <class Element, int Capacity>
class NonFiniteGuard {
 public:
  void take(Scratch& scratch, int64_t heads, int64_t dim) {
    scratch.take(is_nonfinite_, heads * Capacity);
    scratch.take(zeros_, dim);
    std::fill_n(zeros_, dim, Element{});
  }

  // Off in the first pass: no token counts as non-finite.
  bool active = false;

  // Marks the tokens of heads [begin, end).
  void find(const PagedAttentionArgs& args, int64_t begin, int64_t end,
            const Chunk<Capacity>& chunk) {
    if (!active) return;
    const auto* values = static_cast<const Element*>(args.value_cache.data);
    const auto* scales = static_cast<const float*>(args.value_scale.data);
    for (int64_t h = begin; h < end; ++h)
      for (int t = 0; t < Capacity; ++t) {
        const Element* row = values + chunk.value[t] + h * args.value_cache.head;
        is_nonfinite_[(h - begin) * Capacity + t] =
            !is_finite(row, args.value_dim) ||
            (scales && !std::isfinite(scales[chunk.value_scale[t] + h * args.value_scale.head]));
      }
  }

  CA_INLINE bool is_nonfinite(int64_t h, int64_t t) const {
    return active && is_nonfinite_[h * Capacity + t];
  }

  // The value, or zeros for a non-finite one.
  CA_INLINE const Element* value(const Element* row, int64_t h, int64_t t) const {
    return is_nonfinite(h, t) ? zeros_ : row;
  }

  // Sets the scores or scales of marked tokens to x.
  void put(float* of_tokens, int64_t h, float x) const {
    if (!active) return;
    for (int t = 0; t < Capacity; ++t)
      if (is_nonfinite_[h * Capacity + t]) of_tokens[t] = x;
  }

 private:
  bool* is_nonfinite_;
  Element* zeros_;
};

// Checks n sums, a multiple of kLanes, in independent chains to hide latency.
inline bool all_finite(const float* sums, int64_t n) {
  constexpr int kAtOnce = 4;
  Floats zero[kAtOnce] = {};
  int64_t i = 0;
  for (; i + kAtOnce * kLanes <= n; i += kAtOnce * kLanes)
    for (int w = 0; w < kAtOnce; ++w) zero[w] += load(sums + i + w * kLanes) * splat(0.0f);
  for (; i < n; i += kLanes) zero[0] += load(sums + i) * splat(0.0f);
  const Floats4 four = hsum(zero[0], zero[1], zero[2], zero[3]);
  return four[0] + four[1] + four[2] + four[3] == 0;  // 0 * x is NaN for non-finite x
}

}  // namespace compiled_attn
