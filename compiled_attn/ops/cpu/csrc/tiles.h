// Many query rows: products of matrices, tile by tile, between softmaxes.
//
// The query heads of a KV head are folded into the rows, and keys and values are brought into the
// order of the inner loop once for a band of tiles. Sizes are such that a tile's panels stay in the
// first level cache and its sums in the second.
#pragma once

#include "bfloat16_dot.h"
#include "elements.h"
#include "few_rows.h"
#include "output.h"
#include "prefetch.h"
#include "scratch.h"
#include "spoilt.h"

namespace compiled_attn {

constexpr int kTileRows = 192;
constexpr int kTileKeys = 256;
constexpr int kTilesOfBand = 8;
constexpr int kBandRows = kTilesOfBand * kTileRows;
constexpr int kRowsOfBlock = 6;                          // rows of the innermost product
constexpr int kWidthOfBlock = kRegisters == 32 ? 4 : 2;  // and its vectors
constexpr int kPanel = kWidthOfBlock * kLanes;           // columns

static_assert(kTileRows % kRowsOfBlock == 0 && kTileKeys % kPanel == 0, "tiles are whole blocks");

// Matrices hold units of 32 bits along the axis that is summed over: a float, or a pair of
// bfloat16. Both are passed as floats.
template <class Element_>
struct FloatUnits {
  using Element = Element_;
  static constexpr int kUnit = 1;  // elements

  CA_INLINE static Floats step(Floats sum, float a, Floats b) { return sum + all(a) * b; }
  CA_INLINE static Floats units(const Element* at) { return load(at); }
  CA_INLINE static Floats zipped(const Element* const* tokens) { return load(tokens[0]); }
  static void query(const PagedAttentionArgs& args, int64_t token, int64_t head, float* to,
                    int64_t n) {
    read_row(args, args.query, token, head, args.head_dim, to, n);
  }
  CA_INLINE static void put_weights(float* row, int64_t i, Floats w) { store(row + i, w); }
};

#if CA_HAS_BFLOAT16_DOT
struct PairUnits {
  using Element = BFloat16;
  static constexpr int kUnit = 2;

  CA_INLINE static Floats step(Floats sum, float a, Floats b) {
    return add_products(sum, bits_as<Pairs>(all(a)), bits_as<Pairs>(b));
  }
  CA_INLINE static Floats units(const BFloat16* at) { return load_as<Floats>(at); }
  CA_INLINE static Floats zipped(const BFloat16* const* tokens) {
    const Ints low = widened(load_as<Words>(tokens[0]));
    return bits_as<Floats>(low | widened(load_as<Words>(tokens[1])) << 16);
  }
  static void query(const PagedAttentionArgs& args, int64_t token, int64_t head, float* to,
                    int64_t n) {
    read_row(args, args.query, token, head, args.head_dim, reinterpret_cast<BFloat16*>(to),
             2 * n);
  }
  // Weights from the i-th on become pairs, in place: what is overwritten was read before.
  CA_INLINE static void put_weights(float* row, int64_t i, Floats w) {
    store(reinterpret_cast<BFloat16*>(row) + i, w);
  }
};
#endif

// out [rows of a block, kPanel] = out * factor + a x panel; if `is_first`: = a x panel.
template <class Units, bool is_first>
void block_product(const float* a, int64_t a_stride, const float* panel, int64_t units,
                   [[maybe_unused]] const float* factor, float* out, int64_t out_stride) {
  Floats sum[kRowsOfBlock][kWidthOfBlock];
#pragma GCC unroll 6
  for (int r = 0; r < kRowsOfBlock; ++r)
#pragma GCC unroll 6
    for (int w = 0; w < kWidthOfBlock; ++w) {
      if constexpr (is_first)
        sum[r][w] = Floats{};
      else
        sum[r][w] = load(out + r * out_stride + w * kLanes) * all(factor[r]);
    }
  for (int64_t u = 0; u < units; ++u) {
    Floats b[kWidthOfBlock];
#pragma GCC unroll 6
    for (int w = 0; w < kWidthOfBlock; ++w) b[w] = load(panel + u * kPanel + w * kLanes);
#pragma GCC unroll 6
    for (int r = 0; r < kRowsOfBlock; ++r)
#pragma GCC unroll 6
      for (int w = 0; w < kWidthOfBlock; ++w)
        sum[r][w] = Units::step(sum[r][w], a[r * a_stride + u], b[w]);
  }
#pragma GCC unroll 6
  for (int r = 0; r < kRowsOfBlock; ++r)
#pragma GCC unroll 6
    for (int w = 0; w < kWidthOfBlock; ++w) store(out + r * out_stride + w * kLanes, sum[r][w]);
}

template <class Units>
class Tiles {
  using Element = typename Units::Element;
  static constexpr int kUnit = Units::kUnit;

 public:
  static constexpr int64_t kLeastRows = kMostRows + 1;
  static int64_t enough_bands(const PagedAttentionArgs& args, int threads) {
    return threads == 1 && !args.window ? 1 : 8;
  }

  explicit Tiles(const PagedAttentionArgs& args)
      : args_(args),
        group_(args.heads / args.kv_heads),
        units_(padded<kLanes>(padded<kUnit>(args.head_dim) / kUnit)),
        value_dim_(padded<kPanel>(args.value_dim)) {
    scratch_.take(queries_, kBandRows * units_);
    scratch_.take(scores_, kRowsOfBlock * kTileKeys);
    scratch_.take(sums_, kBandRows * value_dim_);
    scratch_.take(keys_, kTileKeys * units_);
    scratch_.take(values_, kTileKeys * value_dim_ / kUnit);
    scratch_.take(copies_, std::max(units_ * kUnit, value_dim_) * kLanes * 2);
    spoilt_.take(scratch_, 1, value_dim_);
    if (args.key_scale.data) {
      scratch_.take(key_scales_, kTileKeys);
      scratch_.take(value_scales_, kTileKeys);
    }
  }

  void run(const Part& part, const Results& results) {
    const Request request(args_, part.request);
    spoilt_.wanted = false;
    add_up(part, request);
    if (part.hides(part.keys, request, group_) && !all_finite(sums_, count_ * value_dim_)) {
      spoilt_.wanted = true;
      add_up(part, request);
    }
    for (int64_t j = 0; j < count_; ++j) results.put(part, j, sums_ + j * value_dim_, running_[j]);
  }

 private:
  void add_up(const Part& part, const Request& request) {
    prepare(part, request);
    next_.fill(request, part.keys.begin, part.keys.end);
    while (next_.chunk().count > 0) {
      chunk_ = next_.chunk();
      next_.fill(request, chunk_.begin + chunk_.count, part.keys.end);
      spoilt_.find(args_, part.kv_begin, part.kv_end, chunk_);
      pack_keys(part.kv_begin);
      pack_values(part.kv_begin);
      if (key_scales_) {
        gather(args_.key_scale, part.kv_begin, part.kv_end, chunk_.key_scale, key_scales_);
        gather(args_.value_scale, part.kv_begin, part.kv_end, chunk_.value_scale, value_scales_);
        spoilt_.put(value_scales_, 0, 0);
      }
      for (int64_t j = 0; j < count_; j += kRowsOfBlock) {
        next_.ask(args_, part.kv_begin, j + kRowsOfBlock, padded<kRowsOfBlock>(count_));
        take(j);
      }
    }
  }

  void prepare(const Part& part, const Request& request) {
    count_ = part.row_end - part.row_begin;
    for (int64_t j = 0; j < padded<kRowsOfBlock>(count_); ++j) {
      const int64_t row = (part.row_begin + j) / group_;
      const int64_t head = part.kv_begin * group_ + (part.row_begin + j) % group_;
      running_[j] = {};
      if (j >= count_) {
        std::fill_n(queries_ + j * units_, units_, 0.0f);
        rows_[j] = {0, 0, {0, 0}};
        continue;
      }
      Units::query(args_, request.first + row, head, queries_ + j * units_, units_);
      rows_[j] = {args_.alibi_slopes ? args_.alibi_slopes[head] : 0.0f, request.position(row),
                  request.seen(row)};
    }
    std::fill_n(sums_, padded<kRowsOfBlock>(count_) * value_dim_, 0.0f);
  }

  // A block of rows takes in the chunk's keys and values: its scores stay in the first level cache.
  void take(int64_t j) {
    const int64_t seen = seen_by_block(j);
    if (!seen) return;
    for (int64_t t = 0; t < seen; t += kPanel)
      block_product<Units, true>(queries_ + j * units_, units_, keys_ + t * units_, units_,
                                 nullptr, scores_ + t, kTileKeys);
    softmax(j, seen);
    for (int64_t d = 0; d < value_dim_; d += kPanel)
      block_product<Units, false>(scores_, kTileKeys, values_ + d * (kTileKeys / kUnit),
                                  (seen + kUnit - 1) / kUnit, factors_,
                                  sums_ + j * value_dim_ + d, value_dim_);
  }

  // Scores of a block with the chunk's first n keys become weights.
  void softmax(int64_t j, int64_t n) {
    Scored scored[kRowsOfBlock];
    for (int r = 0; r < kRowsOfBlock; ++r) {
      float* scores = scores_ + r * kTileKeys;
      spoilt_.put(scores, 0, NAN);
      scored[r] = finish_scores(args_, rows_[j + r], chunk_.begin, n, key_scales_, scores);
    }
    finish_weights(scored, padded<kScoreStep>(n), scores_, kTileKeys, running_ + j, factors_,
                   [&](int r, int64_t i, Floats w) {
                     if (value_scales_) w *= load(value_scales_ + i);
                     Units::put_weights(scores_ + r * kTileKeys, i, w);
                   });
  }

  // How many of the chunk's first keys some row of a block sees. The last of its rows that there
  // are sees furthest, the first one begins first.
  int64_t seen_by_block(int64_t j) const {
    const Span first = rows_[j].seen, last = rows_[std::min(j + kRowsOfBlock, count_) - 1].seen;
    if (first.begin >= chunk_.begin + chunk_.count) return 0;
    return std::clamp<int64_t>(last.end - chunk_.begin, 0, chunk_.count);
  }

  // Keys as panels [units, kPanel]: each column a token.
  void pack_keys(int64_t h) {
    const Element* from =
        static_cast<const Element*>(args_.key_cache.data) + h * args_.key_cache.head;
    const int64_t whole = args_.head_dim / (kLanes * kUnit) * kLanes;
    for (int64_t t = 0; t < chunk_.count; t += kLanes) {
      float* panel = keys_ + t / kPanel * kPanel * units_ + t % kPanel;
      for (int64_t u = 0; u < units_; u += kLanes) {
        Floats rows[kLanes];
        for (int i = 0; i < kLanes; ++i) {
          const Element* row = from + chunk_.key[t + i] + u * kUnit;
          rows[i] = u < whole ? Units::units(row)
                              : Units::units(rest(row, args_.head_dim - u * kUnit, 0));
        }
        transpose(rows);
        for (int i = 0; i < kLanes; ++i) store(panel + (u + i) * kPanel, rows[i]);
      }
    }
  }

  // Values as panels [tokens / kUnit, kPanel]: each column an element.
  void pack_values(int64_t h) {
    const Element* from =
        static_cast<const Element*>(args_.value_cache.data) + h * args_.value_cache.head;
    for (int64_t t = 0; t < chunk_.count; t += kUnit) {
      const Element* rows[kUnit];
      for (int i = 0; i < kUnit; ++i)
        rows[i] = spoilt_.value(from + chunk_.value[t + i], 0, t + i);
      for (int64_t d = 0; d < value_dim_; d += kLanes) {
        const Element* tokens[kUnit];
        const int64_t left = args_.value_dim - d;
        for (int i = 0; i < kUnit; ++i)
          tokens[i] = left < kLanes ? rest(rows[i] + d, left, i) : rows[i] + d;
        float* panel = values_ + d / kPanel * kPanel * (kTileKeys / kUnit) + d % kPanel;
        store(panel + t / kUnit * kPanel, Units::zipped(tokens));
      }
    }
  }

  // The last elements of a row, with zeros behind.
  const Element* rest(const Element* row, int64_t n, int which) {
    Element* copy = copies_ + which * kLanes * kUnit;
    std::memset(copy, 0, kLanes * kUnit * sizeof(Element));
    if (n > 0) std::memcpy(copy, row, n * sizeof(Element));
    return copy;
  }

  const PagedAttentionArgs& args_;
  Scratch scratch_;
  int64_t group_, units_, value_dim_, count_ = 0;
  float *queries_, *scores_, *sums_, *keys_, *values_;
  Element* copies_;
  float *key_scales_ = nullptr, *value_scales_ = nullptr;  // of the chunk
  float factors_[kRowsOfBlock];
  Running running_[kBandRows];
  ScoreRow rows_[kBandRows];
  Chunk<kTileKeys> chunk_;
  NextChunk<Element, kTileKeys> next_;
  Spoilt<Element, kTileKeys> spoilt_;
};

}  // namespace compiled_attn
