// Softmax of transposed scores for the AMX kernel: a query row is one of kTile columns; exponents
// are base 2.
#pragma once

#include <cmath>

#include "attention/amx_panels.h"
#include "attention/scores.h"

namespace compiled_attn {

// log2 by which a score may exceed the maximum before sums are rescaled
constexpr float kSlack = 8;

// sum + both elements of each pair
CA_INLINE Floats plus_pairs(Floats sum, Ints pairs) {
#if CA_HAS_BF16_DOT
  return dot_bf16(sum, (BFloat16x2)pairs, _mm512_set1_epi32(0x3f803f80));
#else
  return sum + bit_cast<Floats>(pairs << 16) + bit_cast<Floats>(pairs & splat(int32_t(0xffff0000)));
#endif
}

// Maxima of the scores of kTile query rows.
struct TileMaxima {
  alignas(64) float of[kTile];

  void clear() { std::fill_n(of, kTile, -INFINITY); }
  // Updates with scores [keys, kTile]; keys is a multiple of kAtOnce.
  CA_INLINE void take(const float* scores, int64_t keys) {
    constexpr int kAtOnce = 4;  // independent chains, to hide latency
    for (int c = 0; c < kTile; c += kLanes) {
      Floats most[kAtOnce] = {load(of + c), splat(-INFINITY), splat(-INFINITY), splat(-INFINITY)};
      for (int64_t t = 0; t < keys; t += kAtOnce)
        for (int i = 0; i < kAtOnce; ++i)
          most[i] = max(load(scores + (t + i) * kTile + c), most[i]);
      store(of + c, max(max(most[0], most[1]), max(most[2], most[3])));
    }
  }
  // Whether a score is too large to subtract its rounded product in a fused multiply-add.
  bool exceeds_exact_range(float scale) const {
    bool is_any = false;
    for (float each : of) is_any |= std::fabs(each * scale) > kLargeScore && each != -INFINITY;
    return is_any;
  }
  void multiply(float scale) {
    for (float& each : of) each *= scale;
  }
};

// What kTile query rows see, and their running softmax.
struct RowState {
  alignas(64) float maxima[kTile], totals[kTile], factors[kTile], slopes[kTile];
  int64_t positions[kTile];
  Span visible[kTile];

  void put(int i, float slope, int64_t position, Span span) {
    maxima[i] = -INFINITY, totals[i] = 0;
    slopes[i] = slope, positions[i] = position, visible[i] = span;
  }

  // Rows are ordered by position.
  int64_t first_begin() const { return visible[0].begin; }
  int64_t last_begin() const { return visible[kTile - 1].begin; }
  int64_t first_end() const { return visible[0].end; }
  int64_t last_end() const { return visible[kTile - 1].end; }

  SoftmaxState softmax(int64_t i) const { return {maxima[i] * kLog2, totals[i]}; }

  // Updates the maxima with scores, not yet multiplied by `scale`. Returns whether sums must be
  // multiplied by `factors`.
  bool update_max(const TileMaxima& scores, float scale) {
    bool is_any = false;
    for (int c = 0; c < kTile; c += kLanes) {
      const Floats largest = load(scores.of + c) * splat(scale);
      const Floats old = load(maxima + c);
      const Ints is_raised = largest > old + splat(kSlack);
      const Floats now = select(is_raised, largest, old);
      const Floats factor = select(is_raised, vexp2_fast(old - now), splat(1.0f));
      store(maxima + c, now);
      store(factors + c, factor);
      store(totals + c, load(totals + c) * factor);
      for (int i = 0; i < kLanes; ++i) is_any |= is_raised[i] != 0;
    }
    return is_any;
  }

  // Rescales sums [dims, kTile].
  void scale(float* sums, int64_t dims) const {
    for (int64_t i = 0; i < dims * kTile; i += kTile)
      for (int w = 0; w < kTile; w += kLanes)
        store(sums + i + w, load(sums + i + w) * load(factors + w));
  }
};

// Turns scores of kTile rows into weights, kKeys keys at a time.
class TileSoftmax {
  static constexpr int kVectors = kTile / kLanes, kKeyPairs = 4;

 public:
  static constexpr int64_t kKeys = 2 * kKeyPairs;

  TileSoftmax() = default;
  TileSoftmax(const RowState& rows, float scale) : scale_(splat(scale)) {
    for (int v = 0; v < kVectors; ++v) {
      const Floats most = load(rows.maxima + v * kLanes);
      origins_[v] = select(most == splat(-INFINITY), Floats{}, most);
      totals_[v] = load(rows.totals + v * kLanes);
    }
  }

  // Scores [kKeys, kTile] -> weights [kKeyPairs, kTile, 2].
  CA_INLINE void take(const float* scores, BFloat16* weights) {
    for (int v = 0; v < kVectors; ++v) {
      Floats total = totals_[v];
#pragma GCC unroll 4
      for (int i = 0; i < kKeyPairs; ++i) {
        const float* at = scores + 2 * i * kTile + v * kLanes;
        const Floats a = vexp2_fast(load(at) * scale_ - origins_[v]);
        const Floats b = vexp2_fast(load(at + kTile) * scale_ - origins_[v]);
        const Ints pairs = round_to_pairs(a, b);
        std::memcpy(weights + 2 * (i * kTile + v * kLanes), &pairs, sizeof pairs);
        total = plus_pairs(total, pairs);
      }
      totals_[v] = total;
    }
  }

  void finish(RowState& rows) const {
    for (int v = 0; v < kVectors; ++v) store(rows.totals + v * kLanes, totals_[v]);
  }

 private:
  Floats origins_[kVectors], totals_[kVectors], scale_;
};

// The keys [low, high) of a chunk that each row sees.
class VisibleRange {
 public:
  VisibleRange(const RowState& rows, int64_t begin, int64_t count) {
    for (int i = 0; i < kTile; ++i) {
      low_[i] = int32_t(std::clamp<int64_t>(rows.visible[i].begin - begin, 0, count));
      high_[i] = int32_t(std::clamp<int64_t>(rows.visible[i].end - begin, 0, count));
    }
  }

  // The keys that all rows see; rows are ordered by position.
  Span of_all() const { return {low_[kTile - 1], std::max(high_[0], low_[kTile - 1])}; }

  // Masks the scores of key t for the rows from c on.
  CA_INLINE Floats masked(Floats scores, int64_t t, int c) const {
    const Ints key = splat(int32_t(t));
    const Ints low = load_as<Ints>(low_ + c), high = load_as<Ints>(high_ + c);
    return select((key >= low) & (key < high), scores, splat(-INFINITY));
  }

 private:
  alignas(64) int32_t low_[kTile], high_[kTile];
};

// Sets products [keys, kTile] to -inf where a row does not see the key, and to NaN where it sees a
// key whose value is not finite. The scale, positive, comes later.
template <class IsNonFinite>
void mask_scores(const VisibleRange& visible_range, Span keys, bool any_nonfinite,
                 const IsNonFinite& is_nonfinite, float* products) {
  const Span plain = any_nonfinite ? Span{keys.end, keys.end} : visible_range.of_all();
  for (int64_t t = keys.begin; t < keys.end; ++t) {
    if (t == plain.begin) t = std::min(plain.end, keys.end);
    if (t == keys.end) break;
    const bool is_lost = any_nonfinite && is_nonfinite(t);
    for (int c = 0; c < kTile; c += kLanes) {
      float* at = products + t * kTile + c;
      store(at, visible_range.masked(is_lost ? splat(NAN) : load(at), t, c));
    }
  }
}

// Turns products [keys, kTile] into scores in log2; `begin` is the position of key 0.
template <class IsNonFinite>
void finish_tile_scores(const PagedAttentionArgs& args, const RowState& rows,
                        const VisibleRange& visible_range, int64_t begin, Span keys,
                        const IsNonFinite& is_nonfinite, float* scores) {
  const Floats scale = splat(float(args.scale));
  const float cap = float(args.softcap);
  for (int c = 0; c < kTile; c += kLanes) {
    Ints away;
    for (int i = 0; i < kLanes; ++i) away[i] = int32_t(begin - rows.positions[c + i]);
    for (int64_t t = keys.begin; t < keys.end; ++t) {
      float* at = scores + t * kTile + c;
      Floats s = load(at) * scale;
      if (cap > 0) s = vtanh(s / splat(cap)) * splat(cap);
      if (args.alibi_slopes) s += load(rows.slopes + c) * to_float(away + splat(int32_t(t)));
      if (is_nonfinite(t)) s = splat(NAN);
      store(at, visible_range.masked(s, t, c) * splat(kLog2E));
    }
  }
}

// kTwoTiles query rows against a chunk.
struct AmxUnit {
  float* scores;      // [2, keys, kTile]
  BFloat16* weights;  // [2, keys / 2, kTile, 2]
  int64_t columns;  // first of its two tiles of rows
  Span tiles;  // in steps of kTwoTiles keys
  float factor;  // from scores to log2
  bool is_unmasked;  // all rows see all keys of the tiles
  TileMaxima largest[2];

  bool is_empty() const { return tiles.begin >= tiles.end; }
  CA_INLINE float* score_tile(int g, int64_t t) const {
    return scores + (g * (kTileKeys / kTile) + t) * kTileFloats;
  }
  CA_INLINE BFloat16* weight_tile(int g, int64_t t) const {
    return weights + (g * (kTileKeys / kTwoTiles) + t) * kTilePairs;
  }
  // Multiplies the scores by the factor now, so that they round as their maxima do.
  void multiply_scores() {
    for (int g = 0; g < 2; ++g) {
      largest[g].multiply(factor);
      const Span all_of{2 * tiles.begin * kTileFloats, 2 * tiles.end * kTileFloats};
      for (int64_t i = all_of.begin; i < all_of.end; i += kLanes)
        store(score_tile(g, 0) + i, load(score_tile(g, 0) + i) * splat(factor));
    }
    factor = 1;
  }
};

class AmxSoftmax {
 public:
  // unit: null for none
  AmxSoftmax(const AmxUnit* unit, RowState* columns) : unit_(unit) {
    if (!unit) return;
    row_states_ = columns + unit->columns;
    start(0);
  }

  CA_INLINE void step() {
    if (at_ < end_) take();
  }

  void finish() {
    while (at_ < end_) take();
  }

 private:
  void start(int g) {
    group_ = g;
    at_ = unit_->tiles.begin * kTwoTiles, end_ = unit_->tiles.end * kTwoTiles;
    softmax_ = TileSoftmax(row_states_[g], unit_->factor);
    scores_ = unit_->score_tile(g, 0), weights_ = unit_->weight_tile(g, 0);
  }

  CA_INLINE void take() {
    softmax_.take(scores_ + at_ * kTile, weights_ + at_ * kTile);
    at_ += TileSoftmax::kKeys;
    if (at_ == end_) next();
  }

  __attribute__((noinline)) void next() {
    softmax_.finish(row_states_[group_]);
    if (group_ == 0) start(1);
  }

  const AmxUnit* unit_;
  RowState* row_states_ = nullptr;
  int group_ = 0;
  int64_t at_ = 0, end_ = 0;
  const float* scores_ = nullptr;
  BFloat16* weights_ = nullptr;
  TileSoftmax softmax_;
};

}  // namespace compiled_attn
