// Prefill of bfloat16 in AMX tiles.
//
// Everything is transposed: scores are keys x rows and sums are dims x rows. So a column is a query
// row, the softmax is elementwise, and two rows of weights zipped to pairs are the next product's
// operand. The vector units compute the softmax of one unit while tiles of others are multiplied.
#pragma once

#include "attention/amx_panels.h"
#include "attention/amx_softmax.h"
#include "attention/prefill.h"

#if CA_HAS_TILES

namespace compiled_attn {

class PrefillKernelAmx : public PrefillBase<PrefillKernelAmx, BFloat16> {
  friend PrefillBase<PrefillKernelAmx, BFloat16>;
  static constexpr int kRowStep = kTwoTiles;

 public:
  static constexpr int64_t kMinRows = 9;  // fewer rows of a KV head go to DecodeKernel

  explicit PrefillKernelAmx(const PagedAttentionArgs& args)
      : PrefillBase(args, ValuePanel::tiles(args) * kTile),
        scale_(args.scale > 0 && args.softcap <= 0 && !args.alibi_slopes ? float(args.scale) : 0) {
    keys_.take(scratch_, args);
    values_.take(scratch_, args);
    query_rows_.take(scratch_, args.head_dim, keys_.tiles() * kTwoTiles);
    scratch_.take(queries_, kBandRows * keys_.tiles() * kTwoTiles);
    scratch_.take(row_states_, kBandRows / kTile);
    scratch_.take(row_, kTile * value_dim_);
    for (auto& unit : units_) {
      scratch_.take(unit.scores, kTwoTiles * kTileKeys);
      scratch_.take(unit.weights, kTwoTiles * kTileKeys);
    }
  }

 private:
  void prepare(const Part& part, const Request& request) {
    for (int64_t j = 0; j < padded<kTwoTiles>(count_); j += kTile) {
      const BFloat16* rows[kTile];
      for (int i = 0; i < kTile; ++i) {
        const int64_t folded = part.row_begin + std::min(j + i, count_ - 1);
        const int64_t row = folded / group_, head = part.kv_begin * group_ + folded % group_;
        const float slope = args_.alibi_slopes ? args_.alibi_slopes[head] : 0.0f;
        row_states_[j / kTile].put(i, slope, request.position(row), request.visible(row));
        rows[i] = query_rows_.whole(row_at<BFloat16>(args_.query, request.first + row, head), i);
      }
      for (int64_t d = 0; d < keys_.tiles(); ++d)
        transpose_tile([&](int i) { return rows[i] + d * kTwoTiles; }, query_tile(j / kTile, d));
    }
  }

  // Attends all rows to the chunk in a pipeline of three units: scores of one, the softmax of the
  // one before, sums of the one before that.
  void attend_chunk(const Part& part) {
    const int64_t h = part.kv_begin;
    keys_.pack(head_of(args_.key_cache, h), chunk_);
    values_.pack(head_of(args_.value_cache, h), chunk_, guard_);
    const int64_t count = padded<kTwoTiles>(count_) / kTwoTiles;
    for (int64_t u = 0; u < count + 2; ++u) {
      AmxUnit &first = units_[u % 3], &second = units_[(u + 2) % 3];
      const AmxUnit& third = units_[(u + 1) % 3];
      if (u < count) begin(first, 2 * u);
      next_.prefetch(args_, h, u + 1, count + 2);
      const bool has_softmax = u >= 1 && u <= count && !second.is_empty();
      if (has_softmax) update_maxima(second);
      AmxSoftmax softmax(has_softmax ? &second : nullptr, row_states_);
      if (u < count)
        for (int64_t t = first.tiles.begin; t < first.tiles.end; ++t)
          multiply_keys(first, t, softmax);
      if (u >= 2 && !third.is_empty())
        for (int64_t d = 0; d < values_.tiles(); d += 2) multiply_values(third, d, softmax);
      softmax.finish();
    }
  }

  void begin(AmxUnit& unit, int64_t columns) const {
    const RowState *first = row_states_ + columns, *last = first + 1;
    const int64_t seen = std::min(last->last_end() - chunk_.begin, chunk_.count);
    const int64_t unseen = std::max<int64_t>(first->first_begin() - chunk_.begin, 0);
    unit.columns = columns;
    unit.tiles = {unseen / kTwoTiles, seen > unseen ? (seen + kTwoTiles - 1) / kTwoTiles : 0};
    const bool all_see_first = last->last_begin() <= chunk_.begin + unit.tiles.begin * kTwoTiles;
    const bool all_see_last = first->first_end() >= chunk_.begin + unit.tiles.end * kTwoTiles;
    unit.is_unmasked = scale_ > 0 && !guard_.active && all_see_first && all_see_last;
    for (TileMaxima& each : unit.largest) each.clear();
  }

  // Computes the scores of kTwoTiles keys.
  CA_INLINE void multiply_keys(AmxUnit& unit, int64_t t, AmxSoftmax& softmax) {
    const BFloat16 *a = keys_.tile(2 * t, 0), *b = query_tile(unit.columns, 0);
    const int64_t dims = keys_.tiles() * kTilePairs;
    tiles_.zero<0>(), tiles_.zero<1>(), tiles_.zero<2>(), tiles_.zero<3>();
    for (int64_t d = 0; d < dims; d += kTilePairs) {
      tiles_.load<4>(a + d), tiles_.load<6>(b + d);
      tiles_.multiply_add<0, 4, 6>();
      tiles_.load<7>(b + dims + d);
      tiles_.multiply_add<1, 4, 7>();
      tiles_.load<5>(a + dims + d);
      tiles_.multiply_add<2, 5, 6>();
      tiles_.multiply_add<3, 5, 7>();
      softmax.step();
    }
    tiles_.store<0>(unit.score_tile(0, 2 * t)), tiles_.store<1>(unit.score_tile(1, 2 * t));
    tiles_.store<2>(unit.score_tile(0, 2 * t + 1)), tiles_.store<3>(unit.score_tile(1, 2 * t + 1));
    if (!unit.is_unmasked) return;
    for (int g = 0; g < 2; ++g) unit.largest[g].take(unit.score_tile(g, 2 * t), kTwoTiles);
  }

  // Adds the chunk's weighted values to kTwoTiles dims.
  CA_INLINE void multiply_values(const AmxUnit& unit, int64_t d, AmxSoftmax& softmax) {
    float *first = sum_tile(unit.columns, d), *second = sum_tile(unit.columns + 1, d);
    const BFloat16 *a = values_.tile(d, 0), *a_next = values_.tile(d + 1, 0);
    const BFloat16 *b = unit.weight_tile(0, 0), *b_next = unit.weight_tile(1, 0);
    tiles_.load<0>(first), tiles_.load<2>(first + kTileFloats);
    tiles_.load<1>(second), tiles_.load<3>(second + kTileFloats);
    for (int64_t t = unit.tiles.begin * kTilePairs; t < unit.tiles.end * kTilePairs;
         t += kTilePairs) {
      tiles_.load<4>(a + t), tiles_.load<6>(b + t);
      tiles_.multiply_add<0, 4, 6>();
      tiles_.load<7>(b_next + t);
      tiles_.multiply_add<1, 4, 7>();
      tiles_.load<5>(a_next + t);
      tiles_.multiply_add<2, 5, 6>();
      tiles_.multiply_add<3, 5, 7>();
      softmax.step();
    }
    tiles_.store<0>(first), tiles_.store<2>(first + kTileFloats);
    tiles_.store<1>(second), tiles_.store<3>(second + kTileFloats);
  }

  // Finishes scores that need more than a scale, and updates the running maxima.
  void update_maxima(AmxUnit& unit) {
    unit.factor = scale_ > 0 ? scale_ * kLog2E : 1;
    for (int g = 0; g < 2 && !unit.is_unmasked; ++g) finish_scores(unit, g);
    if (unit.largest[0].exceeds_exact_range(unit.factor) ||
        unit.largest[1].exceeds_exact_range(unit.factor))
      unit.multiply_scores();
    for (int g = 0; g < 2; ++g) {
      RowState& rows = row_states_[unit.columns + g];
      if (rows.update_max(unit.largest[g], unit.factor))
        rows.scale(sum_tile(unit.columns + g, 0), value_dim_);
    }
  }

  void finish_scores(AmxUnit& unit, int g) const {
    const Span keys{unit.tiles.begin * kTwoTiles, unit.tiles.end * kTwoTiles};
    const RowState& rows = row_states_[unit.columns + g];
    const VisibleRange visible_range(rows, chunk_.begin, chunk_.count);
    const auto is_nonfinite = [&](int64_t t) { return guard_.is_nonfinite(0, t); };
    float* scores = unit.score_tile(g, 0);
    if (scale_ > 0)
      mask_scores(visible_range, keys, guard_.active, is_nonfinite, scores);
    else
      finish_tile_scores(args_, rows, visible_range, chunk_.begin, keys, is_nonfinite, scores);
    unit.largest[g].take(scores + keys.begin * kTile, keys.end - keys.begin);
  }

  void write(const Part& part, const Results& results) {
    for (int64_t j = 0; j < count_; j += kTile) {
      for (int64_t d = 0; d < values_.tiles(); ++d) {
        alignas(64) float tile[kTileFloats];
        transpose_tile([&](int i) { return sum_tile(j / kTile, d) + i * kTile; }, tile);
        for (int i = 0; i < kTile; ++i)
          std::memcpy(row_ + i * value_dim_ + d * kTile, tile + i * kTile, kTile * sizeof(float));
      }
      for (int64_t i = 0; i < std::min<int64_t>(count_ - j, kTile); ++i)
        results.put(part, j + i, row_ + i * value_dim_, row_states_[j / kTile].softmax(i));
    }
  }

  BFloat16* query_tile(int64_t columns, int64_t d) const {
    return queries_ + (columns * keys_.tiles() + d) * kTilePairs;
  }
  float* sum_tile(int64_t columns, int64_t d) const {
    return sums_ + (columns * values_.tiles() + d) * kTileFloats;
  }

  TileRegisters tiles_;
  float scale_;  // 0: scores need more than a scale
  KeyPanel keys_;
  ValuePanel values_;
  PaddedRows query_rows_;
  BFloat16* queries_;
  float* row_;  // [kTile, value_dim], transposed for output
  RowState* row_states_;
  AmxUnit units_[3];
};

}  // namespace compiled_attn

#endif
