// Many query rows of bfloat16, in products of tiles.
//
// Everything is transposed: scores are keys x rows and sums are dims x rows, so that a column is a
// query row, the softmax is element by element, and two rows of weights joined as pairs are the
// next product's operand as they are. While tiles are multiplied for some rows, the vector units
// take the softmax of those before.
#pragma once

#include "matrix_panels.h"
#include "matrix_softmax.h"
#include "output.h"
#include "prefetch.h"
#include "tiles.h"

#if CA_HAS_TILES

namespace compiled_attn {

class MatrixRows {
 public:
  static constexpr int64_t kLeastRows = 9;    // fewer rows of a KV head are left to FewRows

  // Bands of a request that are enough: each packs its keys again. A window's first key, and so the
  // bits of its sums, depends on the band.
  static int64_t enough_bands(const PagedAttentionArgs& args, int threads) {
    return threads == 1 && !args.window ? 1 : 8;
  }

  explicit MatrixRows(const PagedAttentionArgs& args)
      : args_(args),
        group_(args.heads / args.kv_heads),
        scale_(args.scale > 0 && args.softcap <= 0 && !args.alibi_slopes ? float(args.scale) : 0) {
    keys_.take(scratch_, args);
    values_.take(scratch_, args);
    query_rows_.take(scratch_, args.head_dim, keys_.tiles() * kColumns);
    scratch_.take(queries_, kBandRows * keys_.tiles() * kColumns);
    scratch_.take(sums_, kBandRows * value_dim());
    scratch_.take(columns_, kBandRows / kTile);
    scratch_.take(row_, kTile * value_dim());
    for (auto& unit : units_) {
      scratch_.take(unit.scores, kColumns * kTileKeys);
      scratch_.take(unit.weights, kColumns * kTileKeys);
    }
    spoilt_.take(scratch_, 1, value_dim());
  }

  void run(const Part& part, const Results& results) {
    const Request request(args_, part.request);
    spoilt_.wanted = false;
    add_up(part, request);
    if (part.hides(part.keys, request, group_) &&
        !all_finite(sums_, padded<kColumns>(count_) * value_dim())) {
      spoilt_.wanted = true;
      add_up(part, request);
    }
    finish(part, results);
  }

 private:
  int64_t value_dim() const { return values_.tiles() * kTile; }

  void add_up(const Part& part, const Request& request) {
    prepare(part, request);
    next_.fill(request, part.keys.begin, part.keys.end);
    while (next_.chunk().count > 0) {
      chunk_ = next_.chunk();
      next_.fill(request, chunk_.begin + chunk_.count, part.keys.end);
      spoilt_.find(args_, part.kv_begin, part.kv_end, chunk_);
      keys_.pack(args_, part.kv_begin, chunk_);
      values_.pack(args_, part.kv_begin, chunk_, spoilt_);
      take_chunk(part.kv_begin);
    }
  }

  void prepare(const Part& part, const Request& request) {
    count_ = part.row_end - part.row_begin;
    for (int64_t j = 0; j < padded<kColumns>(count_); j += kTile) {
      const BFloat16* rows[kTile];
      for (int i = 0; i < kTile; ++i) {
        const int64_t folded = part.row_begin + std::min(j + i, count_ - 1);
        const int64_t row = folded / group_, head = part.kv_begin * group_ + folded % group_;
        const float slope = args_.alibi_slopes ? args_.alibi_slopes[head] : 0.0f;
        columns_[j / kTile].put(i, slope, request.position(row), request.seen(row));
        rows[i] = query_rows_.whole(row_at<BFloat16>(args_.query, request.first + row, head), i);
      }
      for (int64_t d = 0; d < keys_.tiles(); ++d)
        transpose_tile([&](int i) { return rows[i] + d * kColumns; }, query_tile(j / kTile, d));
    }
    std::fill_n(sums_, padded<kColumns>(count_) * value_dim(), 0.0f);
  }

  // All rows against the chunk, three units at a time: scores of one, the softmax of the one
  // before, sums of the one before that.
  void take_chunk(int64_t h) {
    const int64_t count = padded<kColumns>(count_) / kColumns;
    for (int64_t u = 0; u < count + 2; ++u) {
      MatrixUnit &first = units_[u % 3], &second = units_[(u + 2) % 3];
      const MatrixUnit& third = units_[(u + 1) % 3];
      if (u < count) begin(first, 2 * u);
      next_.ask(args_, h, u + 1, count + 2);
      const bool softens = u >= 1 && u <= count && !second.is_empty();
      if (softens) raise(second);
      UnitSoftmax softmax(softens ? &second : nullptr, columns_);
      if (u < count)
        for (int64_t t = first.tiles.begin; t < first.tiles.end; ++t)
          multiply_keys(first, t, softmax);
      if (u >= 2 && !third.is_empty())
        for (int64_t d = 0; d < values_.tiles(); d += 2) multiply_values(third, d, softmax);
      softmax.finish();
    }
  }

  void begin(MatrixUnit& unit, int64_t columns) const {
    const Columns *first = columns_ + columns, *last = first + 1;
    const int64_t seen = std::min(last->last_end() - chunk_.begin, chunk_.count);
    const int64_t unseen = std::max<int64_t>(first->first_begin() - chunk_.begin, 0);
    unit.columns = columns;
    unit.tiles = {unseen / kColumns, seen > unseen ? (seen + kColumns - 1) / kColumns : 0};
    const bool sees_first = last->last_begin() <= chunk_.begin + unit.tiles.begin * kColumns;
    const bool sees_last = first->first_end() >= chunk_.begin + unit.tiles.end * kColumns;
    unit.is_open = scale_ > 0 && !spoilt_.wanted && sees_first && sees_last;
    for (Largest& each : unit.largest) each.clear();
  }

  // Scores of kColumns keys.
  CA_INLINE void multiply_keys(MatrixUnit& unit, int64_t t, UnitSoftmax& softmax) {
    const BFloat16 *a = keys_.tile(2 * t, 0), *b = query_tile(unit.columns, 0);
    const int64_t dims = keys_.tiles() * kTilePairs;
    tiles_.zero<0>(), tiles_.zero<1>(), tiles_.zero<2>(), tiles_.zero<3>();
    for (int64_t d = 0; d < dims; d += kTilePairs) {
      tiles_.load<4>(a + d), tiles_.load<6>(b + d);
      tiles_.add_products<0, 4, 6>();
      tiles_.load<7>(b + dims + d);
      tiles_.add_products<1, 4, 7>();
      tiles_.load<5>(a + dims + d);
      tiles_.add_products<2, 5, 6>();
      tiles_.add_products<3, 5, 7>();
      softmax.step();
    }
    tiles_.store<0>(unit.score_tile(0, 2 * t)), tiles_.store<1>(unit.score_tile(1, 2 * t));
    tiles_.store<2>(unit.score_tile(0, 2 * t + 1)), tiles_.store<3>(unit.score_tile(1, 2 * t + 1));
    if (!unit.is_open) return;
    for (int g = 0; g < 2; ++g) unit.largest[g].take(unit.score_tile(g, 2 * t), kColumns);
  }

  // Adds the chunk's values, weighted, to kColumns dims.
  CA_INLINE void multiply_values(const MatrixUnit& unit, int64_t d, UnitSoftmax& softmax) {
    float *first = sum_tile(unit.columns, d), *second = sum_tile(unit.columns + 1, d);
    const BFloat16 *a = values_.tile(d, 0), *a_next = values_.tile(d + 1, 0);
    const BFloat16 *b = unit.weight_tile(0, 0), *b_next = unit.weight_tile(1, 0);
    tiles_.load<0>(first), tiles_.load<2>(first + kTileFloats);
    tiles_.load<1>(second), tiles_.load<3>(second + kTileFloats);
    for (int64_t t = unit.tiles.begin * kTilePairs; t < unit.tiles.end * kTilePairs;
         t += kTilePairs) {
      tiles_.load<4>(a + t), tiles_.load<6>(b + t);
      tiles_.add_products<0, 4, 6>();
      tiles_.load<7>(b_next + t);
      tiles_.add_products<1, 4, 7>();
      tiles_.load<5>(a_next + t);
      tiles_.add_products<2, 5, 6>();
      tiles_.add_products<3, 5, 7>();
      softmax.step();
    }
    tiles_.store<0>(first), tiles_.store<2>(first + kTileFloats);
    tiles_.store<1>(second), tiles_.store<3>(second + kTileFloats);
  }

  // Before scores become weights: what is due beside a scale, and new maxima.
  void raise(MatrixUnit& unit) {
    unit.factor = scale_ > 0 ? scale_ * kLog2E : 1;
    for (int g = 0; g < 2 && !unit.is_open; ++g) finish_scores(unit, g);
    if (unit.largest[0].is_great(unit.factor) || unit.largest[1].is_great(unit.factor))
      unit.multiply_scores();
    for (int g = 0; g < 2; ++g) {
      Columns& rows = columns_[unit.columns + g];
      if (rows.raise(unit.largest[g], unit.factor))
        rows.scale(sum_tile(unit.columns + g, 0), value_dim());
    }
  }

  // Scores that are not products alone.
  void finish_scores(MatrixUnit& unit, int g) const {
    const Span keys{unit.tiles.begin * kColumns, unit.tiles.end * kColumns};
    const Columns& rows = columns_[unit.columns + g];
    const Sight sight(rows, chunk_.begin, chunk_.count);
    const auto is_spoilt = [&](int64_t t) { return spoilt_.is_spoilt(0, t); };
    float* scores = unit.score_tile(g, 0);
    if (scale_ > 0)
      hide(sight, keys, spoilt_.wanted, is_spoilt, scores);
    else
      finish_columns(args_, rows, sight, chunk_.begin, keys, is_spoilt, scores);
    unit.largest[g].take(scores + keys.begin * kTile, keys.end - keys.begin);
  }

  void finish(const Part& part, const Results& results) {
    for (int64_t j = 0; j < count_; j += kTile) {
      for (int64_t d = 0; d < values_.tiles(); ++d) {
        alignas(64) float tile[kTileFloats];
        transpose_tile([&](int i) { return sum_tile(j / kTile, d) + i * kTile; }, tile);
        for (int i = 0; i < kTile; ++i)
          std::memcpy(row_ + i * value_dim() + d * kTile, tile + i * kTile, kTile * sizeof(float));
      }
      for (int64_t i = 0; i < std::min<int64_t>(count_ - j, kTile); ++i)
        results.put(part, j + i, row_ + i * value_dim(), columns_[j / kTile].running(i));
    }
  }

  BFloat16* query_tile(int64_t columns, int64_t d) const {
    return queries_ + (columns * keys_.tiles() + d) * kTilePairs;
  }
  float* sum_tile(int64_t columns, int64_t d) const {
    return sums_ + (columns * values_.tiles() + d) * kTileFloats;
  }

  const PagedAttentionArgs& args_;
  Scratch scratch_;
  TileRegisters tiles_;
  int64_t group_, count_ = 0;
  float scale_;  // 0: scores are more than a product
  KeyPanel keys_;
  ValuePanel values_;
  WholeRows query_rows_;
  BFloat16* queries_;
  float *sums_, *row_;  // of all rows, and of some as they are given out
  Columns* columns_;
  MatrixUnit units_[3];
  Chunk<kTileKeys> chunk_;
  NextChunk<BFloat16, kTileKeys> next_;
  Spoilt<BFloat16, kTileKeys> spoilt_;
};

}  // namespace compiled_attn

#endif
