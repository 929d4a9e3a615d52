// From products of queries and keys to weights: scale, softcap, ALiBi, visibility, softmax.
#pragma once

#include <cmath>

#include "request.h"
#include "scratch.h"
#include "simd.h"

namespace compiled_attn {

constexpr int kScoreStep = 32;  // rows of scores are padded to this

// What one row of scores needs besides the products.
struct ScoreRow {
  float slope;       // ALiBi, 0: none
  int64_t position;  // of the query
  Span seen;
};

// Products of a row with the keys at [begin, begin + n), padded to a multiple of kScoreStep, become
// scores; -inf where a key is not seen. Returns the largest, lane by lane.
inline Floats finish_scores(const PagedAttentionArgs& args, const ScoreRow& row, int64_t begin,
                            int64_t n, const float* key_scales, float* scores) {
  const Floats scale = all(float(args.scale));
  const float cap = float(args.softcap);
  const bool partly = row.seen.begin > begin || row.seen.end < begin + n || n % kScoreStep;
  const bool is_plain = !partly && row.slope == 0 && cap <= 0;
  const Ints low = all(int32_t(std::max<int64_t>(row.seen.begin - begin, 0)));
  const Ints high = all(int32_t(std::min<int64_t>(row.seen.end - begin, n)));
  Floats most = all(-INFINITY);
  for (int64_t i = 0; i < padded<kScoreStep>(n); i += kLanes) {
    Floats s = load(scores + i) * scale;
    if (key_scales) s *= load(key_scales + i);
    if (!is_plain) {
      if (cap > 0) s = hyperbolic_tangent(s / all(cap)) * all(cap);
      const Ints at = ramp() + all(int32_t(i));
      if (row.slope != 0) s += all(row.slope) * as_floats(at + all(int32_t(begin - row.position)));
      if (partly) s = either((at >= low) & (at < high), s, all(-INFINITY));
    }
    store(scores + i, s);
    most = larger(s, most);
  }
  return most;
}

inline void scale_all(float factor, int64_t n, float* sums) {
  for (int64_t i = 0; i < n; i += kLanes) store(sums + i, load(sums + i) * all(factor));
}

// The running softmax of a row (Milakov and Gimelshein, 2018).
struct Running {
  float maximum = -INFINITY, total = 0;

  // Takes in the maximum of more scores; returns what earlier sums are to be multiplied by.
  float raise(float most) {
    if (!(most > maximum)) return 1.0f;
    const float factor = std::exp(maximum - most);
    maximum = most, total *= factor;
    return factor;
  }

  // What is subtracted from scores before they become weights.
  float origin() const { return maximum == -INFINITY ? 0.0f : maximum; }
};

// Takes more sums [n] and their softmax into others. Never inlined: the same bits everywhere.
__attribute__((noinline)) inline void fold(const Running& more, const float* more_sums, int64_t n,
                                           Running& all, float* sums) {
  const float factor = all.raise(more.maximum);
  const float weight = std::exp(more.maximum - all.origin());
  all.total += more.total * weight;
  if (factor != 1)
    for (int64_t i = 0; i < n; ++i) sums[i] *= factor;
  for (int64_t i = 0; i < n; ++i) sums[i] += more_sums[i] * weight;
}

// Four vectors, the last one again where there are fewer.
template <int count>
CA_INLINE const Floats& up_to(const Floats (&v)[count], int i) {
  return v[i < count ? i : count - 1];
}

// put(r, i, weights) takes the weights e^(score - maximum) of row r from the i-th of n on, for some
// rows of scores, whose largest are given lane by lane. Earlier sums of each row are to be
// multiplied by its factor.
template <int rows, class Put>
CA_INLINE void finish_weights(const Floats (&most)[rows], int64_t n, const float* scores,
                              int64_t stride, Running* running, float* factors, const Put& put) {
  static_assert(rows <= 4, "one vector of results");
  const Floats4 maxima = largest(up_to(most, 0), up_to(most, 1), up_to(most, 2), up_to(most, 3));
  Floats origins[rows], totals[rows] = {};
  for (int r = 0; r < rows; ++r) {
    factors[r] = running[r].raise(maxima[r]);
    origins[r] = all(running[r].origin());
  }
  for (int64_t i = 0; i < n; i += kLanes)
    for (int r = 0; r < rows; ++r) {
      const Floats w = exponential(load(scores + r * stride + i) - origins[r]);
      totals[r] += w;
      put(r, i, w);
    }
  const Floats4 more = sums(up_to(totals, 0), up_to(totals, 1), up_to(totals, 2), up_to(totals, 3));
  for (int r = 0; r < rows; ++r) running[r].total += more[r];
}

}  // namespace compiled_attn
