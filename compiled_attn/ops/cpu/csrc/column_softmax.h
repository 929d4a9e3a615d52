// The softmax of transposed scores: a query row is a column of kTile, powers are of two.
#pragma once

#include <cmath>

#include "bfloat16_dot.h"
#include "pairs.h"
#include "scores.h"
#include "tile_registers.h"

namespace compiled_attn {

constexpr float kSlack = 8;  // powers that a weight may rise to before earlier sums are scaled

// 2^x, relative error 3e-6; 1 at 0. A polynomial of degree 4 on [0, 1).
CA_INLINE Floats power_of_two(Floats x) {
#if defined(__AVX512DQ__)
  const Floats f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF);
  Floats p = all(1.3426688e-2f);
  p = p * f + all(5.2242468e-2f);
  p = p * f + all(2.4128021e-1f);
  p = p * f + all(6.9304484e-1f);
  p = p * f + all(1.0f);
  return _mm512_scalef_ps(p, x);
#else
  return exponential(x * all(kLog2));
#endif
}

// sum + both halves of each pair.
CA_INLINE Floats plus_pairs(Floats sum, Ints pairs) {
#if CA_HAS_BFLOAT16_DOT
  return add_products(sum, (Pairs)pairs, _mm512_set1_epi32(0x3f803f80));
#else
  return sum + bits_as<Floats>(pairs << 16) + bits_as<Floats>(pairs & all(int32_t(0xffff0000)));
#endif
}

// The largest scores of kTile query rows.
struct Largest {
  alignas(64) float of[kTile];

  void clear() { std::fill_n(of, kTile, -INFINITY); }
  // Takes in scores [keys, kTile]; keys: a multiple of kAtOnce.
  CA_INLINE void take(const float* scores, int64_t keys) {
    constexpr int kAtOnce = 4;  // as each waits for the one before
    for (int c = 0; c < kTile; c += kLanes) {
      Floats most[kAtOnce] = {load(of + c), all(-INFINITY), all(-INFINITY), all(-INFINITY)};
      for (int64_t t = 0; t < keys; t += kAtOnce)
        for (int i = 0; i < kAtOnce; ++i)
          most[i] = larger(load(scores + (t + i) * kTile + c), most[i]);
      store(of + c, larger(larger(most[0], most[1]), larger(most[2], most[3])));
    }
  }
  // Whether one is beyond what a fused multiply-add may compare with its rounded product.
  bool is_great(float scale) const {
    bool is_any = false;
    for (float each : of) is_any |= std::fabs(each * scale) > kGreat && each != -INFINITY;
    return is_any;
  }
  void multiply(float scale) {
    for (float& each : of) each *= scale;
  }
};

// kTile query rows: what they see, and their running softmax.
struct Columns {
  alignas(64) float maxima[kTile], totals[kTile], factors[kTile], slopes[kTile];
  int64_t positions[kTile];
  Span seen[kTile];

  void put(int i, float slope, int64_t position, Span span) {
    maxima[i] = -INFINITY, totals[i] = 0;
    slopes[i] = slope, positions[i] = position, seen[i] = span;
  }

  // Rows are in the order of their positions.
  int64_t first_begin() const { return seen[0].begin; }
  int64_t last_begin() const { return seen[kTile - 1].begin; }
  int64_t first_end() const { return seen[0].end; }
  int64_t last_end() const { return seen[kTile - 1].end; }

  Running running(int64_t i) const { return {maxima[i] * kLog2, totals[i]}; }

  // Takes in the largest scores, which are to be multiplied by `scale`; whether earlier sums are to
  // be multiplied by `factors`.
  bool raise(const Largest& scores, float scale) {
    bool is_any = false;
    for (int c = 0; c < kTile; c += kLanes) {
      const Floats largest = load(scores.of + c) * all(scale);
      const Floats old = load(maxima + c);
      const Ints is_raised = largest > old + all(kSlack);
      const Floats now = either(is_raised, largest, old);
      const Floats factor = either(is_raised, power_of_two(old - now), all(1.0f));
      store(maxima + c, now);
      store(factors + c, factor);
      store(totals + c, load(totals + c) * factor);
      for (int i = 0; i < kLanes; ++i) is_any |= is_raised[i] != 0;
    }
    return is_any;
  }

  // Multiplies sums [dims, kTile] by `factors`.
  void scale(float* sums, int64_t dims) const {
    for (int64_t i = 0; i < dims * kTile; i += kTile)
      for (int w = 0; w < kTile; w += kLanes)
        store(sums + i + w, load(sums + i + w) * load(factors + w));
  }
};

// From scores of kTile rows to weights, some keys at a time.
class Weigher {
  static constexpr int kVectors = kTile / kLanes, kPairs = 4;

 public:
  static constexpr int64_t kKeys = 2 * kPairs;

  Weigher() = default;
  Weigher(const Columns& rows, float scale) : scale_(all(scale)) {
    for (int v = 0; v < kVectors; ++v) {
      const Floats most = load(rows.maxima + v * kLanes);
      origins_[v] = either(most == all(-INFINITY), Floats{}, most);
      totals_[v] = load(rows.totals + v * kLanes);
    }
  }

  // Scores [kKeys, kTile] to weights [kPairs, kTile, 2].
  CA_INLINE void take(const float* scores, BFloat16* weights) {
    for (int v = 0; v < kVectors; ++v) {
      Floats total = totals_[v];
#pragma GCC unroll 4
      for (int i = 0; i < kPairs; ++i) {
        const float* at = scores + 2 * i * kTile + v * kLanes;
        const Floats a = power_of_two(load(at) * scale_ - origins_[v]);
        const Floats b = power_of_two(load(at + kTile) * scale_ - origins_[v]);
        const Ints pairs = joined_pairs(a, b);
        std::memcpy(weights + 2 * (i * kTile + v * kLanes), &pairs, sizeof pairs);
        total = plus_pairs(total, pairs);
      }
      totals_[v] = total;
    }
  }

  void finish(Columns& rows) const {
    for (int v = 0; v < kVectors; ++v) store(rows.totals + v * kLanes, totals_[v]);
  }

 private:
  Floats origins_[kVectors], totals_[kVectors], scale_;
};

// What rows see of a chunk whose `count` keys are at `begin`: [low, high), row by row.
class Sight {
 public:
  Sight(const Columns& rows, int64_t begin, int64_t count) {
    for (int i = 0; i < kTile; ++i) {
      low_[i] = int32_t(std::clamp<int64_t>(rows.seen[i].begin - begin, 0, count));
      high_[i] = int32_t(std::clamp<int64_t>(rows.seen[i].end - begin, 0, count));
    }
  }

  // The keys that all rows see; rows are in the order of their positions.
  Span of_all() const { return {low_[kTile - 1], std::max(high_[0], low_[kTile - 1])}; }

  // Scores of key t, of the rows from c on.
  CA_INLINE Floats masked(Floats scores, int64_t t, int c) const {
    const Ints key = all(int32_t(t));
    const Ints low = load_as<Ints>(low_ + c), high = load_as<Ints>(high_ + c);
    return either((key >= low) & (key < high), scores, all(-INFINITY));
  }

 private:
  alignas(64) int32_t low_[kTile], high_[kTile];
};

// Products [keys, kTile], which are to be multiplied by a positive scale, become -inf where a row
// does not see a key, and NaN where it sees one that is spoilt.
template <class IsSpoilt>
void hide(const Sight& sight, Span keys, bool is_any_spoilt, const IsSpoilt& is_spoilt,
          float* products) {
  const Span plain = is_any_spoilt ? Span{keys.end, keys.end} : sight.of_all();
  for (int64_t t = keys.begin; t < keys.end; ++t) {
    if (t == plain.begin) t = std::min(plain.end, keys.end);
    if (t == keys.end) break;
    const bool is_lost = is_any_spoilt && is_spoilt(t);
    for (int c = 0; c < kTile; c += kLanes) {
      float* at = products + t * kTile + c;
      store(at, sight.masked(is_lost ? all(NAN) : load(at), t, c));
    }
  }
}

// Products [keys, kTile] become scores as powers of two. The keys are at `begin` and on.
template <class IsSpoilt>
void finish_columns(const PagedAttentionArgs& args, const Columns& rows, const Sight& sight,
                    int64_t begin, Span keys, const IsSpoilt& is_spoilt, float* scores) {
  const Floats scale = all(float(args.scale));
  const float cap = float(args.softcap);
  for (int c = 0; c < kTile; c += kLanes) {
    Ints away;
    for (int i = 0; i < kLanes; ++i) away[i] = int32_t(begin - rows.positions[c + i]);
    for (int64_t t = keys.begin; t < keys.end; ++t) {
      float* at = scores + t * kTile + c;
      Floats s = load(at) * scale;
      if (cap > 0) s = hyperbolic_tangent(s / all(cap)) * all(cap);
      if (args.alibi_slopes) s += load(rows.slopes + c) * as_floats(away + all(int32_t(t)));
      if (is_spoilt(t)) s = all(NAN);
      store(at, sight.masked(s, t, c) * all(kLog2E));
    }
  }
}

}  // namespace compiled_attn
