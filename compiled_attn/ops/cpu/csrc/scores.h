// From products of queries and keys to weights: scale, softcap, ALiBi, visibility, softmax.
#pragma once

#include <cmath>

#include "request.h"
#include "scratch.h"
#include "simd.h"

namespace compiled_attn {

constexpr float kLog2E = 1.44269504f, kLog2 = 0.693147180f;
// A product is not rounded before the largest one, which is, is subtracted: from here on scores are
// multiplied first, as the difference may be a great power.
constexpr float kGreat = 1 << 20;
constexpr int kScoreStep = 32;  // rows of scores are padded to this

// What one row of scores needs besides the products.
struct ScoreRow {
  float slope;       // ALiBi, 0: none
  int64_t position;  // of the query
  Span seen;
};

// Scores of a row: the largest, lane by lane, and what is yet to be multiplied with all of them.
struct Scored {
  Floats most;
  float factor = 1;
};

// Products of a row with the keys at [begin, begin + n), padded to a multiple of kScoreStep, become
// scores; -inf where a key is not seen. Where all that is missing is the scale, they stay as they
// are: it comes with the first step of the exponential.
inline Scored finish_scores(const PagedAttentionArgs& args, const ScoreRow& row, int64_t begin,
                            int64_t n, const float* key_scales, float* scores) {
  const float factor = float(args.scale), cap = float(args.softcap);
  const bool partly = row.seen.begin > begin || row.seen.end < begin + n || n % kScoreStep;
  const bool is_plain = !partly && row.slope == 0 && cap <= 0;
  Floats most = all(-INFINITY);
  if (is_plain && !key_scales && factor > 0 && factor <= 1) {  // the largest overflows nowhere
    static_assert(kScoreStep % (2 * kLanes) == 0, "pairs of vectors");
    Floats other = most;
    for (int64_t i = 0; i < n; i += 2 * kLanes) {
      most = larger(load(scores + i), most);
      other = larger(load(scores + i + kLanes), other);
    }
    return {larger(most, other) * all(factor), factor};
  }
  const Ints low = all(int32_t(std::max<int64_t>(row.seen.begin - begin, 0)));
  const Ints high = all(int32_t(std::min<int64_t>(row.seen.end - begin, n)));
  for (int64_t i = 0; i < padded<kScoreStep>(n); i += kLanes) {
    Floats s = load(scores + i) * all(factor);
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
  return {most};
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

// Four values, the last one again where there are fewer.
template <class Value, int count>
CA_INLINE const Value& up_to(const Value (&v)[count], int i) {
  return v[i < count ? i : count - 1];
}

// put(r, i, weights) takes the weights e^(score - maximum) of row r from the i-th of n on, for some
// rows of scores. Earlier sums of each row are to be multiplied by its factor.
template <int rows, class Put>
CA_INLINE void finish_weights(const Scored (&scored)[rows], int64_t n, float* scores,
                              int64_t stride, Running* running, float* factors, const Put& put) {
  static_assert(rows <= 4, "one vector of results");
  const Floats4 maxima = largest(up_to(scored, 0).most, up_to(scored, 1).most,
                                 up_to(scored, 2).most, up_to(scored, 3).most);
  Floats origins[rows], scales[rows], totals[rows] = {};
  for (int r = 0; r < rows; ++r) {
    factors[r] = running[r].raise(maxima[r]);
    origins[r] = all(running[r].origin()), scales[r] = all(scored[r].factor);
    if (scored[r].factor == 1 || std::abs(running[r].origin()) < kGreat) continue;
    scale_all(scored[r].factor, n, scores + r * stride);
    scales[r] = all(1.0f);
  }
  for (int64_t i = 0; i < n; i += kLanes) {
    Floats w[rows];
    apply(w, [&](Floats, int r) {
      return load(scores + r * stride + i) * scales[r] - origins[r];
    });
    exponentials(w);
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) {
      totals[r] += w[r];
      put(r, i, w[r]);
    }
  }
  const Floats4 more = sums(up_to(totals, 0), up_to(totals, 1), up_to(totals, 2), up_to(totals, 3));
  for (int r = 0; r < rows; ++r) running[r].total += more[r];
}

}  // namespace compiled_attn
