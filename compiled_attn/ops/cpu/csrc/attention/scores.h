// From products of queries and keys to weights: scale, softcap, ALiBi, mask, softmax.
#pragma once

#include <cmath>

#include "attention/request.h"
#include "scratch.h"
#include "vector/vmath.h"

namespace compiled_attn {

// Up to this size a score may be multiplied in the same fused multiply-add that subtracts the
// maximum, which is rounded. Larger scores are multiplied first, or the difference could be a large
// exponent.
constexpr float kLargeScore = 1 << 20;
constexpr int kScoreStep = 32;  // rows of scores are padded to this

// What a row of scores needs besides the products.
struct ScoreRow {
  float slope;       // ALiBi, 0: none
  int64_t position;  // of the query
  Span visible;
};

// Maxima of a row of scores lane by lane, and the factor that scores are yet to be multiplied by.
struct ScoreStats {
  Floats maxima;
  float factor = 1;
};

// Turns products with the keys [begin, begin + n), padded to a multiple of kScoreStep, into scores;
// -inf where a key is masked. If only the scale is missing, leaves it to the exponential.
inline ScoreStats finish_scores(const PagedAttentionArgs& args, const ScoreRow& row, int64_t begin,
                            int64_t n, const float* key_scales, float* scores) {
  const float factor = float(args.scale), cap = float(args.softcap);
  // With segments, rows of a step must not matter, which decide where a chunk ends.
  const int64_t whole = args.segment ? kSegmentUnit : n;
  const bool partly =
      row.visible.begin > begin || row.visible.end < begin + whole || n % kScoreStep;
  const bool is_plain = !partly && row.slope == 0 && cap <= 0;
  Floats most = splat(-INFINITY);
  if (is_plain && !key_scales && factor > 0 && factor <= 1) {  // cannot overflow
    static_assert(kScoreStep % (2 * kLanes) == 0, "pairs of vectors");
    Floats other = most;
    for (int64_t i = 0; i < n; i += 2 * kLanes) {
      most = max(load(scores + i), most);
      other = max(load(scores + i + kLanes), other);
    }
    return {max(most, other) * splat(factor), factor};
  }
  const Ints low = splat(int32_t(std::max<int64_t>(row.visible.begin - begin, 0)));
  const Ints high = splat(int32_t(std::min<int64_t>(row.visible.end - begin, n)));
  for (int64_t i = 0; i < padded<kScoreStep>(n); i += kLanes) {
    Floats s = load(scores + i) * splat(factor);
    if (key_scales) s *= load(key_scales + i);
    if (!is_plain) {
      if (cap > 0) s = vtanh(s / splat(cap)) * splat(cap);
      const Ints at = ramp() + splat(int32_t(i));
      if (row.slope != 0)
        s += splat(row.slope) * to_float(at + splat(int32_t(begin - row.position)));
      if (partly) s = select((at >= low) & (at < high), s, splat(-INFINITY));
    }
    store(scores + i, s);
    most = max(s, most);
  }
  return {most};
}

inline void scale_all(float factor, int64_t n, float* sums) {
  for (int64_t i = 0; i < n; i += kLanes) store(sums + i, load(sums + i) * splat(factor));
}

// Running softmax of a row (Milakov and Gimelshein, 2018).
struct SoftmaxState {
  float maximum = -INFINITY, total = 0;

  // Updates the maximum; returns the factor to rescale earlier sums by.
  float update_max(float most) {
    if (!(most > maximum)) return 1.0f;
    const float factor = std::exp(maximum - most);
    maximum = most, total *= factor;
    return factor;
  }

  // What to subtract from scores before the exponential.
  float origin() const { return maximum == -INFINITY ? 0.0f : maximum; }
};

// Merges sums [n] and their softmax into others. Never inlined, so that all callers get the same
// bits.
CA_NOINLINE inline void merge_softmax(const SoftmaxState& more, const float* more_sums, int64_t n,
                                      SoftmaxState& all, float* sums) {
  const float factor = all.update_max(more.maximum);
  const float weight = std::exp(more.maximum - all.origin());
  all.total += more.total * weight;
  if (factor != 1)
    for (int64_t i = 0; i < n; ++i) sums[i] *= factor;
  for (int64_t i = 0; i < n; ++i) sums[i] += more_sums[i] * weight;
}

// v[i], or the last one.
template <class Value, int count>
CA_INLINE const Value& up_to(const Value (&v)[count], int i) {
  return v[i < count ? i : count - 1];
}

// Calls put(r, i, weights) with the weights e^(score - maximum) of row r from the i-th of n on.
// Earlier sums of a row must be multiplied by its factor.
template <int rows, class Put>
CA_INLINE void softmax_weights(const ScoreStats (&scored)[rows], int64_t n, float* scores,
                               int64_t stride, SoftmaxState* states, float* factors,
                               const Put& put) {
  static_assert(rows <= 4, "one vector of results");
  const Floats4 maxima = hmax(up_to(scored, 0).maxima, up_to(scored, 1).maxima,
                              up_to(scored, 2).maxima, up_to(scored, 3).maxima);
  Floats origins[rows], scales[rows], totals[rows] = {};
  for (int r = 0; r < rows; ++r) {
    factors[r] = states[r].update_max(maxima[r]);
    origins[r] = splat(states[r].origin()), scales[r] = splat(scored[r].factor);
    if (scored[r].factor == 1 || std::abs(states[r].origin()) < kLargeScore) continue;
    scale_all(scored[r].factor, n, scores + r * stride);
    scales[r] = splat(1.0f);
  }
  for (int64_t i = 0; i < n; i += kLanes) {
    Floats w[rows];
    apply(w, [&](Floats, int r) {
      return load(scores + r * stride + i) * scales[r] - origins[r];
    });
    vexp(w);
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) {
      totals[r] += w[r];
      put(r, i, w[r]);
    }
  }
  const Floats4 more = hsum(up_to(totals, 0), up_to(totals, 1), up_to(totals, 2), up_to(totals, 3));
  for (int r = 0; r < rows; ++r) states[r].total += more[r];
}

}  // namespace compiled_attn
