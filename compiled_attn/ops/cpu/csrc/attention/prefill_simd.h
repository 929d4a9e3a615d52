// Prefill in SIMD registers: tiled matrix products between softmaxes.
//
// Everything is transposed: scores are keys x rows and sums are dims x rows, so that a lane is a
// query row (a head of a token) and the softmax is elementwise. Reads keys and values in place,
// broadcasting one element to many rows; converts other dtypes once per band of tiles.
#pragma once

#include "attention/decode.h"
#include "attention/prefill.h"
#include "attention/prefill_units.h"

namespace compiled_attn {

static_assert(kTileRows % kPanel == 0 && kTileKeys % kBlockRows == 0, "tiles are whole blocks");

template <class Units>
class PrefillKernel : public PrefillBase<PrefillKernel<Units>, typename Units::Element> {
  using Base = PrefillBase<PrefillKernel<Units>, typename Units::Element>;
  friend Base;
  using Element = typename Units::Element;
  using Base::args_, Base::scratch_, Base::group_, Base::value_dim_, Base::count_, Base::sums_;
  using Base::chunk_, Base::next_, Base::guard_;
  static constexpr int kUnit = Units::kUnit;
  static constexpr int kRowStep = kPanel;

 public:
  static constexpr int64_t kMinRows = kMaxDecodeRows + 1;

  explicit PrefillKernel(const PagedAttentionArgs& args)
      : Base(args, padded<kLanes>(padded<kBlockRows>(args.value_dim))),
        units_(padded<kUnit>(args.head_dim) / kUnit),
        defers_scale_(args.softcap <= 0 && !args.key_scale.data && !args.alibi_slopes &&
                      args.scale > 1e-30 && args.scale <= 1),
        log2_scale_((defers_scale_ ? float(args.scale) : 1) * kLog2E) {
    scratch_.take(queries_, kBandRows * units_);
    scratch_.take(rows_, kBandRows / kPanel);
    scratch_.take(scores_, kTileKeys * kPanel);
    scratch_.take(keys_, kTileKeys * padded<kLanes>(units_));
    scratch_.take(values_, kTileKeys / kUnit * value_dim_);
    scratch_.take(row_, kLanes * std::max(padded<kLanes>(units_), value_dim_));
    if (args.key_scale.data) {
      scratch_.take(key_scales_, kTileKeys);
      scratch_.take(value_scales_, kTileKeys);
    }
  }

 private:
  void attend_chunk(const Part& part) {
    find_keys(part.kv_begin);
    find_values(part.kv_begin);
    if (key_scales_) {
      gather(args_.key_scale, part.kv_begin, part.kv_end, chunk_.key_scale, key_scales_);
      gather(args_.value_scale, part.kv_begin, part.kv_end, chunk_.value_scale, value_scales_);
      guard_.put(value_scales_, 0, 0);
    }
    for (int64_t j = 0; j < count_; j += kPanel) {
      next_.prefetch(args_, part.kv_begin, j + kPanel, padded<kPanel>(count_));
      attend_panel(j);
    }
  }

  // Packs queries as panels [units, kPanel], one row a column; repeats the last row as padding.
  void prepare(const Part& part, const Request& request) {
    const int64_t room = padded<kLanes>(units_);
    int64_t row = part.row_begin / group_, of_group = part.row_begin % group_;
    for (int64_t j = 0; j < padded<kPanel>(count_); j += kLanes) {
      PanelState& rows = rows_[j / kPanel];
      const float* queries[kLanes];
      for (int64_t i = 0; i < kLanes; ++i) {
        const int64_t token = request.first + row, head = part.kv_begin * group_ + of_group;
        queries[i] = Units::query(args_, token, head);
        if (!queries[i]) {
          Units::copy_query(args_, token, head, row_ + i * room, room);
          queries[i] = row_ + i * room;
        }
        rows.put((j + i) % kPanel, args_.alibi_slopes ? args_.alibi_slopes[head] : 0.0f,
                 request.position(row), request.visible(row));
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
  }

  // Locates the chunk's keys and values as units, converting where needed; padding repeats the
  // last token.
  void find_keys(int64_t h) {
    const Element* from = this->head_of(args_.key_cache, h);
    for (int64_t t = 0; t < padded<kBlockRows>(chunk_.count); ++t) {
      const Element* row = from + chunk_.key[t];
      key_[t] = Units::key(row, args_.head_dim);
      if (key_[t]) continue;
      float* copy = keys_ + t * padded<kLanes>(units_);
      Units::copy_key(row, args_.head_dim, copy);
      key_[t] = copy;
    }
  }

  void find_values(int64_t h) {
    const Element* from = this->head_of(args_.value_cache, h);
    for (int64_t t = 0; t < chunk_.count; t += kUnit) {
      const Element* rows[kUnit];
      for (int i = 0; i < kUnit; ++i)
        rows[i] = guard_.value(from + chunk_.value[t + i], 0, t + i);
      const float*& value = value_[t / kUnit];
      value = Units::value(rows, args_.value_dim);
      if (value) continue;
      float* copy = values_ + t / kUnit * value_dim_;
      Units::copy_value(rows, args_.value_dim, copy);
      value = copy;
    }
  }

  void attend_panel(int64_t j) {
    PanelState& rows = rows_[j / kPanel];
    const Span some = within_chunk(rows.any_visible());
    if (some.begin >= some.end) return;
    const int64_t first = some.begin / kBlockRows * kBlockRows;
    Floats most[kBlockVectors];
    for (auto& each : most) each = splat(-INFINITY);
    const Span plain = plain_keys(rows, {first, some.end});
    for (int64_t t = first; t < some.end; t += kBlockRows)
      multiply_keys(t, queries_ + j * units_, t >= plain.begin && t < plain.end, most);
    apply_softmax(rows, {first, some.end}, plain, most);
    float* sums = sums_ + j * value_dim_;
    for (int64_t d = 0; d < args_.value_dim; d += kBlockRows)
      multiply_values(d, {first / kUnit, (some.end + kUnit - 1) / kUnit}, sums + d * kPanel);
  }

  Span within_chunk(Span keys) const {
    return {std::clamp<int64_t>(keys.begin - chunk_.begin, 0, chunk_.count),
            std::clamp<int64_t>(keys.end - chunk_.begin, 0, chunk_.count)};
  }

  // The whole blocks of `keys` whose products need only the scale and that every row sees.
  Span plain_keys(const PanelState& rows, Span keys) const {
    const Span seen = within_chunk(rows.all_visible());
    const int64_t begin = std::max(padded<kBlockRows>(seen.begin), keys.begin);
    const int64_t end = seen.end / kBlockRows * kBlockRows;
    const bool has_plain = defers_scale_ && !guard_.active && begin < end;
    return has_plain ? Span{begin, end} : Span{keys.end, keys.end};
  }

  // Multiplies a block of keys with a panel of rows; updates the maxima of plain products.
  void multiply_keys(int64_t t, const float* panel, bool is_plain,
                     Floats (&most)[kBlockVectors]) const {
    const float* row[kBlockRows];
    std::copy_n(key_ + t, kBlockRows, row);
    SumBlock sums;
    sums.begin([](int, int) { return Floats{}; });
    sums.template multiply_add<Units>([&](int r, int64_t u) { return row[r] + u; }, panel, units_);
    if (is_plain) sums.update_max(most);
    sums.put(scores_ + t * kPanel);
  }

  // Adds weighted values to sums [kBlockRows, kPanel] for the dims from d on.
  void multiply_values(int64_t d, Span units, float* sums) const {
    const float* const* values = value_ + units.begin;
    SumBlock block;
    block.begin([&](int r, int w) {
      return load(sums + r * kPanel + w * kLanes) * load(factors_ + w * kLanes);
    });
    block.template multiply_add<Units>([&](int r, int64_t u) { return values[u] + d + r; },
                                       scores_ + units.begin * kPanel, units.end - units.begin);
    block.put(sums);
  }

  // Turns products into weights; the maxima of plain products are known.
  void apply_softmax(PanelState& rows, Span keys, Span plain, Floats (&most)[kBlockVectors]) {
    if (guard_.active)
      for (int64_t t = keys.begin; t < keys.end; ++t)
        if (guard_.is_nonfinite(0, t)) std::fill_n(scores_ + t * kPanel, kPanel, NAN);
    finish_scores(rows, {keys.begin, plain.begin}, most);
    finish_scores(rows, {plain.end, keys.end}, most);
    Floats origins[kBlockVectors];
    for (int w = 0; w < kBlockVectors; ++w) origins[w] = update_max(rows, w, most[w]);
    weigh(rows, keys, origins);
  }

  // Finishes products that need more than a deferred scale; -inf where a row does not see the key.
  void finish_scores(const PanelState& rows, Span keys, Floats (&most)[kBlockVectors]) {
    const float cap = float(args_.softcap);
    for (int64_t t = keys.begin; t < keys.end; ++t) {
      const Ints at = splat(int32_t(chunk_.begin + t));
      for (int w = 0; w < kBlockVectors; ++w) {
        float* scores = scores_ + t * kPanel + w * kLanes;
        Floats s = load(scores);
        if (!defers_scale_) s *= splat(float(args_.scale));
        if (key_scales_) s *= splat(key_scales_[t]);
        if (cap > 0) s = vtanh(s / splat(cap)) * splat(cap);
        if (args_.alibi_slopes)
          s += load(rows.slope + w * kLanes) *
               to_float(at - load_as<Ints>(rows.position + w * kLanes));
        const Ints begin = load_as<Ints>(rows.begin + w * kLanes);
        const Ints end = load_as<Ints>(rows.end + w * kLanes);
        s = select((at >= begin) & (at < end), s, splat(-INFINITY));
        store(scores, s);
        most[w] = max(s, most[w]);
      }
    }
  }

  // Updates the running maximum and `factors_`; returns the origin to subtract in log2.
  Floats update_max(PanelState& rows, int w, Floats most) {
    most *= splat(log2_scale_);
    const Floats before = load(rows.maximum + w * kLanes);
    const Ints rises = most > before;
    const Floats maximum = select(rises, most, before);
    Floats factor[] = {select(rises, before - maximum, Floats{})};
    vexp2(factor);
    store(factors_ + w * kLanes, factor[0]);
    store(rows.maximum + w * kLanes, maximum);
    store(rows.total + w * kLanes, load(rows.total + w * kLanes) * factor[0]);
    return select(maximum == splat(-INFINITY), Floats{}, maximum);
  }

  // Turns scores into weights exp2(score - maximum), in units of kUnit keys.
  void weigh(PanelState& rows, Span keys, const Floats (&origins)[kBlockVectors]) {
    constexpr int count = kUnit * kBlockVectors;
    Floats powers[kBlockVectors];
    multiply_large_scores(keys, origins, powers);
    Floats totals[kBlockVectors];
    for (int w = 0; w < kBlockVectors; ++w) totals[w] = load(rows.total + w * kLanes);
    for (int64_t t = keys.begin; t < keys.end; t += kUnit) {
      Floats weights[count];
      apply(weights, [&](Floats, int i) {
        const int w = i % kBlockVectors;
        return load(scores_ + t * kPanel + i * kLanes) * powers[w] - origins[w];
      });
      vexp2(weights);
      if (kUnit > 1 && t + 1 == keys.end)
        for (int i = kBlockVectors; i < count; ++i) weights[i] = Floats{};
#pragma GCC unroll 8
      for (int i = 0; i < count; ++i) {
        totals[i % kBlockVectors] += weights[i];
        if (value_scales_) weights[i] *= splat(value_scales_[t + i / kBlockVectors]);
      }
      float* to = scores_ + t / kUnit * kPanel;  // overwrites scores already read
#pragma GCC unroll 8
      for (int w = 0; w < kBlockVectors; ++w)
        store(to + w * kLanes, Units::pack_weights(weights + w));
    }
    for (int w = 0; w < kBlockVectors; ++w) store(rows.total + w * kLanes, totals[w]);
  }

  // Applies the log2 scale now to large scores, whose product must round as their maximum did;
  // returns the scale left for each vector.
  void multiply_large_scores(Span keys, const Floats (&origins)[kBlockVectors],
                      Floats (&powers)[kBlockVectors]) {
    static_assert(kBlockVectors <= 4, "one vector of results");
    Floats sizes[kBlockVectors];
    apply(sizes, [&](Floats, int w) { return max(origins[w], -origins[w]); });
    apply(powers, [&](Floats, int w) {
      return select(sizes[w] < splat(kLargeScore), splat(log2_scale_), splat(1.0f));
    });
    const Floats4 most =
        hmax(up_to(sizes, 0), up_to(sizes, 1), up_to(sizes, 2), up_to(sizes, 3));
    const auto is_small = [&](int w) { return most[w] < kLargeScore; };  // false for NaN
    if (is_small(0) && is_small(1) && is_small(2) && is_small(3)) return;
    for (int64_t t = keys.begin; t < keys.end; ++t)
      for (int w = 0; w < kBlockVectors; ++w) {
        float* scores = scores_ + t * kPanel + w * kLanes;
        const Floats s = load(scores);
        store(scores, select(sizes[w] < splat(kLargeScore), s, s * splat(log2_scale_)));
      }
  }

  void write(const Part& part, const Results& results) {
    for (int64_t j = 0; j < count_; j += kLanes) {
      const PanelState& rows = rows_[j / kPanel];
      const float* sums = sums_ + j / kPanel * kPanel * value_dim_ + j % kPanel;
      for (int64_t d = 0; d < value_dim_; d += kLanes) {
        Floats square[kLanes];
        for (int i = 0; i < kLanes; ++i) square[i] = load(sums + (d + i) * kPanel);
        transpose(square);
        for (int i = 0; i < kLanes; ++i) store(row_ + i * value_dim_ + d, square[i]);
      }
      for (int64_t i = 0; i < std::min<int64_t>(count_ - j, kLanes); ++i)
        results.put(part, j + i, row_ + i * value_dim_, rows.softmax((j + i) % kPanel));
    }
  }

  int64_t units_;
  bool defers_scale_;  // applies the scale with the exponential
  float log2_scale_;  // from a stored score to log2
  float *queries_, *scores_, *keys_, *values_;
  float* row_;  // [kLanes, max(units, value_dim)]
  float *key_scales_ = nullptr, *value_scales_ = nullptr;  // [kTileKeys]
  const float *key_[kTileKeys], *value_[kTileKeys];  // in units
  alignas(64) float factors_[kPanel];
  PanelState* rows_;
};

}  // namespace compiled_attn
