// Many query rows: products of matrices, tile by tile, between softmaxes.
//
// Everything is transposed: scores are keys x rows and sums are dims x rows, so that a lane is a
// query row (a head of a token), and the softmax goes element by element. Keys and values are read
// where they lie, one number for many rows; only those of other types are converted, once for a
// band of tiles.
#pragma once

#include "few_rows.h"
#include "output.h"
#include "prefetch.h"
#include "row_panels.h"
#include "spoilt.h"
#include "units.h"

namespace compiled_attn {

constexpr int kTileRows = 192;
constexpr int kTileKeys = 256;
constexpr int kTilesOfBand = 8;
constexpr int kBandRows = kTilesOfBand * kTileRows;

static_assert(kTileRows % kPanel == 0 && kTileKeys % kRowsOfBlock == 0, "tiles are whole blocks");

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
        units_(padded<kUnit>(args.head_dim) / kUnit),
        value_dim_(padded<kLanes>(padded<kRowsOfBlock>(args.value_dim))),
        waits_(args.softcap <= 0 && !args.key_scale.data && !args.alibi_slopes &&
               args.scale > 1e-30 && args.scale <= 1),
        powers_((waits_ ? float(args.scale) : 1) * kLog2E) {
    scratch_.take(queries_, kBandRows * units_);
    scratch_.take(rows_, kBandRows / kPanel);
    scratch_.take(scores_, kTileKeys * kPanel);
    scratch_.take(sums_, kBandRows * value_dim_);
    scratch_.take(keys_, kTileKeys * padded<kLanes>(units_));
    scratch_.take(values_, kTileKeys / kUnit * value_dim_);
    scratch_.take(row_, kLanes * std::max(padded<kLanes>(units_), value_dim_));
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
    if (part.hides(part.keys, request, group_) &&
        !all_finite(sums_, padded<kPanel>(count_) * value_dim_)) {
      spoilt_.wanted = true;
      add_up(part, request);
    }
    put(part, results);
  }

 private:
  void add_up(const Part& part, const Request& request) {
    prepare(part, request);
    next_.fill(request, part.keys.begin, part.keys.end);
    while (next_.chunk().count > 0) {
      chunk_ = next_.chunk();
      next_.fill(request, chunk_.begin + chunk_.count, part.keys.end);
      spoilt_.find(args_, part.kv_begin, part.kv_end, chunk_);
      find_keys(part.kv_begin);
      find_values(part.kv_begin);
      if (key_scales_) {
        gather(args_.key_scale, part.kv_begin, part.kv_end, chunk_.key_scale, key_scales_);
        gather(args_.value_scale, part.kv_begin, part.kv_end, chunk_.value_scale, value_scales_);
        spoilt_.put(value_scales_, 0, 0);
      }
      for (int64_t j = 0; j < count_; j += kPanel) {
        next_.ask(args_, part.kv_begin, j + kPanel, padded<kPanel>(count_));
        take(j);
      }
    }
  }

  // Queries as panels [units, kPanel]: each column a row, the last one again where there are fewer.
  void prepare(const Part& part, const Request& request) {
    count_ = part.row_end - part.row_begin;
    const int64_t room = padded<kLanes>(units_);
    int64_t row = part.row_begin / group_, of_group = part.row_begin % group_;
    for (int64_t j = 0; j < padded<kPanel>(count_); j += kLanes) {
      PanelRows& rows = rows_[j / kPanel];
      const float* queries[kLanes];
      for (int64_t i = 0; i < kLanes; ++i) {
        const int64_t token = request.first + row, head = part.kv_begin * group_ + of_group;
        queries[i] = Units::query(args_, token, head);
        if (!queries[i]) {
          Units::copy_query(args_, token, head, row_ + i * room, room);
          queries[i] = row_ + i * room;
        }
        rows.put((j + i) % kPanel, args_.alibi_slopes ? args_.alibi_slopes[head] : 0.0f,
                 request.position(row), request.seen(row));
        if (j + i + 1 < count_ && ++of_group == group_) of_group = 0, ++row;
      }
      float* panel = queries_ + j / kPanel * kPanel * units_ + j % kPanel;
      for (int64_t u = 0; u < units_; u += kLanes) {
        Floats square[kLanes];
        for (int i = 0; i < kLanes; ++i) square[i] = load(queries[i] + u);
        transpose(square);
        for (int64_t i = 0; i < std::min<int64_t>(units_ - u, kLanes); ++i)
          store(panel + (u + i) * kPanel, square[i]);
      }
    }
    std::fill_n(sums_, padded<kPanel>(count_) * value_dim_, 0.0f);
  }

  // Where the chunk's keys and values are, as units. Those behind its last token repeat it.
  void find_keys(int64_t h) {
    const auto* from = static_cast<const Element*>(args_.key_cache.data) + h * args_.key_cache.head;
    for (int64_t t = 0; t < padded<kRowsOfBlock>(chunk_.count); ++t) {
      const Element* row = from + chunk_.key[t];
      key_[t] = Units::key(row, args_.head_dim);
      if (key_[t]) continue;
      float* copy = keys_ + t * padded<kLanes>(units_);
      Units::copy_key(row, args_.head_dim, copy);
      key_[t] = copy;
    }
  }

  void find_values(int64_t h) {
    const auto* from =
        static_cast<const Element*>(args_.value_cache.data) + h * args_.value_cache.head;
    for (int64_t t = 0; t < chunk_.count; t += kUnit) {
      const Element* rows[kUnit];
      for (int i = 0; i < kUnit; ++i)
        rows[i] = spoilt_.value(from + chunk_.value[t + i], 0, t + i);
      const float*& value = value_[t / kUnit];
      value = Units::value(rows, args_.value_dim);
      if (value) continue;
      float* copy = values_ + t / kUnit * value_dim_;
      Units::copy_value(rows, args_.value_dim, copy);
      value = copy;
    }
  }

  // A panel of rows takes in the chunk's keys and values.
  void take(int64_t j) {
    PanelRows& rows = rows_[j / kPanel];
    const Span some = within_chunk(rows.some());
    if (some.begin >= some.end) return;
    const int64_t first = some.begin / kRowsOfBlock * kRowsOfBlock;
    Floats most[kWidthOfBlock];
    for (auto& each : most) each = all(-INFINITY);
    const Span plain = plain_keys(rows, {first, some.end});
    for (int64_t t = first; t < some.end; t += kRowsOfBlock)
      multiply_keys(t, queries_ + j * units_, t >= plain.begin && t < plain.end, most);
    soften(rows, {first, some.end}, plain, most);
    float* sums = sums_ + j * value_dim_;
    for (int64_t d = 0; d < args_.value_dim; d += kRowsOfBlock)
      multiply_values(d, {first / kUnit, (some.end + kUnit - 1) / kUnit}, sums + d * kPanel);
  }

  Span within_chunk(Span keys) const {
    return {std::clamp<int64_t>(keys.begin - chunk_.begin, 0, chunk_.count),
            std::clamp<int64_t>(keys.end - chunk_.begin, 0, chunk_.count)};
  }

  // Of some keys, whole blocks whose products lack nothing but the scale, and that all rows see.
  Span plain_keys(const PanelRows& rows, Span keys) const {
    const Span seen = within_chunk(rows.all());
    const int64_t begin = std::max(padded<kRowsOfBlock>(seen.begin), keys.begin);
    const int64_t end = seen.end / kRowsOfBlock * kRowsOfBlock;
    return waits_ && !spoilt_.wanted && begin < end ? Span{begin, end} : Span{keys.end, keys.end};
  }

  // Products of the keys from the t-th on with a panel of rows, and the largest of plain ones.
  void multiply_keys(int64_t t, const float* panel, bool is_plain,
                     Floats (&most)[kWidthOfBlock]) const {
    const float* row[kRowsOfBlock];
    std::copy_n(key_ + t, kRowsOfBlock, row);
    SumBlock sums;
    sums.begin([](int, int) { return Floats{}; });
    sums.template add_products<Units>([&](int r, int64_t u) { return row[r] + u; }, panel, units_);
    if (is_plain) sums.raise(most);
    sums.put(scores_ + t * kPanel);
  }

  // Adds some values, weighted: sums [kRowsOfBlock, kPanel] of the dims from d on.
  void multiply_values(int64_t d, Span units, float* sums) const {
    const float* const* values = value_ + units.begin;
    SumBlock block;
    block.begin([&](int r, int w) {
      return load(sums + r * kPanel + w * kLanes) * load(factors_ + w * kLanes);
    });
    block.template add_products<Units>([&](int r, int64_t u) { return values[u] + d + r; },
                                       scores_ + units.begin * kPanel, units.end - units.begin);
    block.put(sums);
  }

  // Products with some of the chunk's keys become weights; the largest of plain ones are known.
  void soften(PanelRows& rows, Span keys, Span plain, Floats (&most)[kWidthOfBlock]) {
    if (spoilt_.wanted)
      for (int64_t t = keys.begin; t < keys.end; ++t)
        if (spoilt_.is_spoilt(0, t)) std::fill_n(scores_ + t * kPanel, kPanel, NAN);
    finish_scores(rows, {keys.begin, plain.begin}, most);
    finish_scores(rows, {plain.end, keys.end}, most);
    Floats origins[kWidthOfBlock];
    for (int w = 0; w < kWidthOfBlock; ++w) origins[w] = raise(rows, w, most[w]);
    weigh(rows, keys, origins);
  }

  // What products are yet to become scores, but for the scale if that waits; -inf where a row does
  // not see the key.
  void finish_scores(const PanelRows& rows, Span keys, Floats (&most)[kWidthOfBlock]) {
    const float cap = float(args_.softcap);
    for (int64_t t = keys.begin; t < keys.end; ++t) {
      const Ints at = all(int32_t(chunk_.begin + t));
      for (int w = 0; w < kWidthOfBlock; ++w) {
        float* scores = scores_ + t * kPanel + w * kLanes;
        Floats s = load(scores);
        if (!waits_) s *= all(float(args_.scale));
        if (key_scales_) s *= all(key_scales_[t]);
        if (cap > 0) s = hyperbolic_tangent(s / all(cap)) * all(cap);
        if (args_.alibi_slopes)
          s += load(rows.slope + w * kLanes) *
               as_floats(at - load_as<Ints>(rows.position + w * kLanes));
        const Ints begin = load_as<Ints>(rows.begin + w * kLanes);
        const Ints end = load_as<Ints>(rows.end + w * kLanes);
        s = either((at >= begin) & (at < end), s, all(-INFINITY));
        store(scores, s);
        most[w] = larger(s, most[w]);
      }
    }
  }

  // Takes in the largest of more scores; returns what is subtracted from their powers. Earlier sums
  // are to be multiplied with the factors.
  Floats raise(PanelRows& rows, int w, Floats most) {
    most *= all(powers_);
    const Floats before = load(rows.maximum + w * kLanes);
    const Ints rises = most > before;
    const Floats maximum = either(rises, most, before);
    Floats factor[] = {either(rises, before - maximum, Floats{})};
    powers_of_two(factor);
    store(factors_ + w * kLanes, factor[0]);
    store(rows.maximum + w * kLanes, maximum);
    store(rows.total + w * kLanes, load(rows.total + w * kLanes) * factor[0]);
    return either(maximum == all(-INFINITY), Floats{}, maximum);
  }

  // Scores become e^(score - maximum), units of kUnit keys.
  void weigh(PanelRows& rows, Span keys, const Floats (&origins)[kWidthOfBlock]) {
    constexpr int count = kUnit * kWidthOfBlock;
    Floats powers[kWidthOfBlock];
    multiply_great(keys, origins, powers);
    Floats totals[kWidthOfBlock];
    for (int w = 0; w < kWidthOfBlock; ++w) totals[w] = load(rows.total + w * kLanes);
    for (int64_t t = keys.begin; t < keys.end; t += kUnit) {
      Floats weights[count];
      apply(weights, [&](Floats, int i) {
        const int w = i % kWidthOfBlock;
        return load(scores_ + t * kPanel + i * kLanes) * powers[w] - origins[w];
      });
      powers_of_two(weights);
      if (kUnit > 1 && t + 1 == keys.end)
        for (int i = kWidthOfBlock; i < count; ++i) weights[i] = Floats{};
#pragma GCC unroll 8
      for (int i = 0; i < count; ++i) {
        totals[i % kWidthOfBlock] += weights[i];
        if (value_scales_) weights[i] *= all(value_scales_[t + i / kWidthOfBlock]);
      }
      float* to = scores_ + t / kUnit * kPanel;  // what was there is read
#pragma GCC unroll 8
      for (int w = 0; w < kWidthOfBlock; ++w) store(to + w * kLanes, Units::joined(weights + w));
    }
    for (int w = 0; w < kWidthOfBlock; ++w) store(rows.total + w * kLanes, totals[w]);
  }

  // What scores of some keys are yet to be multiplied with; those of great ones are by now.
  void multiply_great(Span keys, const Floats (&origins)[kWidthOfBlock],
                      Floats (&powers)[kWidthOfBlock]) {
    static_assert(kWidthOfBlock <= 4, "one vector of results");
    Floats sizes[kWidthOfBlock];
    apply(sizes, [&](Floats, int w) { return larger(origins[w], -origins[w]); });
    apply(powers, [&](Floats, int w) {
      return either(sizes[w] < all(kGreat), all(powers_), all(1.0f));
    });
    const Floats4 most =
        largest(up_to(sizes, 0), up_to(sizes, 1), up_to(sizes, 2), up_to(sizes, 3));
    if (most[0] < kGreat && most[1] < kGreat && most[2] < kGreat && most[3] < kGreat) return;
    for (int64_t t = keys.begin; t < keys.end; ++t)
      for (int w = 0; w < kWidthOfBlock; ++w) {
        float* scores = scores_ + t * kPanel + w * kLanes;
        const Floats s = load(scores);
        store(scores, either(sizes[w] < all(kGreat), s, s * all(powers_)));
      }
  }

  void put(const Part& part, const Results& results) {
    for (int64_t j = 0; j < count_; j += kLanes) {
      const PanelRows& rows = rows_[j / kPanel];
      const float* sums = sums_ + j / kPanel * kPanel * value_dim_ + j % kPanel;
      for (int64_t d = 0; d < value_dim_; d += kLanes) {
        Floats square[kLanes];
        for (int i = 0; i < kLanes; ++i) square[i] = load(sums + (d + i) * kPanel);
        transpose(square);
        for (int i = 0; i < kLanes; ++i) store(row_ + i * value_dim_ + d, square[i]);
      }
      for (int64_t i = 0; i < std::min<int64_t>(count_ - j, kLanes); ++i)
        results.put(part, j + i, row_ + i * value_dim_, rows.running((j + i) % kPanel));
    }
  }

  const PagedAttentionArgs& args_;
  Scratch scratch_;
  int64_t group_, units_, value_dim_, count_ = 0;
  bool waits_;    // the scale, for the weights
  float powers_;  // of two in a score as it is when it becomes a weight
  float *queries_, *scores_, *sums_, *keys_, *values_;
  float* row_;  // kLanes rows of queries or of sums
  float *key_scales_ = nullptr, *value_scales_ = nullptr;  // of the chunk
  const float *key_[kTileKeys], *value_[kTileKeys];        // rows of units
  alignas(64) float factors_[kPanel];
  PanelRows* rows_;
  Chunk<kTileKeys> chunk_;
  NextChunk<Element, kTileKeys> next_;
  Spoilt<Element, kTileKeys> spoilt_;
};

}  // namespace compiled_attn
