// From products of queries and keys to weights: scale, softcap, ALiBi, visibility, softmax.
#pragma once

#include <cmath>

#include "request.h"
#include "scratch.h"
#include "simd.h"

namespace compiled_attn {

constexpr int kScoreStep = kLanes > 8 ? kLanes : 8;  // rows of scores are padded to this

// What one row of scores needs besides the products.
struct ScoreRow {
  float slope;       // ALiBi, 0: none
  int64_t position;  // of the query
  Span seen;
};

// Products of a row with the keys at [begin, begin + n), padded to a multiple of kScoreStep, become
// scores; -inf where a key is not seen. Returns the largest.
inline float finish_scores(const PagedAttentionArgs& args, const ScoreRow& row, int64_t begin,
                           int64_t n, const float* key_scales, float* scores) {
  const Floats scale = all(float(args.scale));
  const float cap = float(args.softcap);
  const bool partly = row.seen.begin > begin || row.seen.end < begin + n || n % kScoreStep;
  const Ints low = all(int32_t(std::max<int64_t>(row.seen.begin - begin, 0)));
  const Ints high = all(int32_t(std::min<int64_t>(row.seen.end - begin, n)));
  Floats most = all(-INFINITY);
  for (int64_t i = 0; i < padded<kScoreStep>(n); i += kLanes) {
    Floats s = load(scores + i) * scale;
    if (key_scales) s *= load(key_scales + i);
    if (args.softcap > 0) s = hyperbolic_tangent(s / all(cap)) * all(cap);
    const Ints at = ramp() + all(int32_t(i));
    if (row.slope != 0) s += all(row.slope) * as_floats(at + all(int32_t(begin - row.position)));
    if (partly) s = either((at >= low) & (at < high), s, all(-INFINITY));
    store(scores + i, s);
    most = larger(s, most);
  }
  return largest(most);
}

// Scores become weights e^(score - maximum). Returns their sum.
inline float finish_weights(float maximum, int64_t n, float* scores) {
  const Floats origin = all(maximum == -INFINITY ? 0.0f : maximum);
  Floats total{};
  for (int64_t i = 0; i < n; i += kLanes) {
    const Floats w = exponential(load(scores + i) - origin);
    store(scores + i, w);
    total += w;
  }
  return sum(total);
}

inline void scale_all(float factor, int64_t n, float* sums) {
  for (int64_t i = 0; i < n; i += kLanes) store(sums + i, load(sums + i) * all(factor));
}

inline void scale_by(const float* scales, int64_t n, float* weights) {
  for (int64_t i = 0; i < n; i += kLanes) store(weights + i, load(weights + i) * load(scales + i));
}

// The running softmax of a row (Milakov and Gimelshein, 2018).
struct Running {
  float maximum = -INFINITY, total = 0;

  // Takes in scores; returns what earlier sums are to be multiplied by.
  float take(float most, int64_t n, float* scores) {
    const float now = most > maximum ? most : maximum;
    const float factor = now == maximum ? 1.0f : std::exp(maximum - now);
    total = total * factor + finish_weights(now, n, scores);
    maximum = now;
    return factor;
  }
};

}  // namespace compiled_attn
