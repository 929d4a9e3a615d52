// The softmax of some rows against a chunk, in steps that fit between products of tiles.
#pragma once

#include "column_softmax.h"
#include "matrix_panels.h"

namespace compiled_attn {

// kColumns rows against a chunk.
struct MatrixUnit {
  float* scores;      // [2, keys, kTile]
  BFloat16* weights;  // [2, keys / 2, kTile, 2]
  int64_t columns;    // the first of its two tiles of rows
  Span tiles;         // of kColumns keys
  float factor;       // of scores, to be powers of two
  bool is_open;       // all rows see all keys of the tiles
  Largest largest[2];

  bool is_empty() const { return tiles.begin >= tiles.end; }
  CA_INLINE float* score_tile(int g, int64_t t) const {
    return scores + (g * (kTileKeys / kTile) + t) * kTileFloats;
  }
  CA_INLINE BFloat16* weight_tile(int g, int64_t t) const {
    return weights + (g * (kTileKeys / kColumns) + t) * kTilePairs;
  }
  // Makes its scores what they are with the factor, each rounded, as their maxima are.
  void multiply_scores() {
    for (int g = 0; g < 2; ++g) {
      largest[g].multiply(factor);
      const Span all_of{2 * tiles.begin * kTileFloats, 2 * tiles.end * kTileFloats};
      for (int64_t i = all_of.begin; i < all_of.end; i += kLanes)
        store(score_tile(g, 0) + i, load(score_tile(g, 0) + i) * all(factor));
    }
    factor = 1;
  }
};

class UnitSoftmax {
 public:
  // unit: null for none.
  UnitSoftmax(const MatrixUnit* unit, Columns* columns) : unit_(unit) {
    if (!unit) return;
    columns_ = columns + unit->columns;
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
    at_ = unit_->tiles.begin * kColumns, end_ = unit_->tiles.end * kColumns;
    weigher_ = Weigher(columns_[g], unit_->factor);
    scores_ = unit_->score_tile(g, 0), weights_ = unit_->weight_tile(g, 0);
  }

  CA_INLINE void take() {
    weigher_.take(scores_ + at_ * kTile, weights_ + at_ * kTile);
    at_ += Weigher::kKeys;
    if (at_ == end_) next();
  }

  __attribute__((noinline)) void next() {
    weigher_.finish(columns_[group_]);
    if (group_ == 0) start(1);
  }

  const MatrixUnit* unit_;
  Columns* columns_ = nullptr;
  int group_ = 0;
  int64_t at_ = 0, end_ = 0;
  const float* scores_ = nullptr;
  BFloat16* weights_ = nullptr;
  Weigher weigher_;
};

}  // namespace compiled_attn
