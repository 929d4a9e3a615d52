// Few query rows against many keys: a race against memory.
//
// Keys and values are read once for all query heads of their group, a chunk of tokens at a time,
// straight from the cache. What comes Forms::ahead_bytes after the tokens in use is prefetched line by
// line in address order, across the block table and into the next part: the hardware does not know
// where the next block lies.
#pragma once

#include "few_rows_digits.h"
#include "few_rows_float16.h"
#include "few_rows_halves.h"
#include "few_rows_loops.h"
#include "few_rows_words.h"
#include "lookahead.h"
#include "output.h"
#include "spoilt.h"

namespace compiled_attn {

constexpr int kRowsAtOnce = 4;  // query rows that share a key in registers
constexpr int kMostRows = 32;   // query rows of one KV head

template <class Math>
class FewRows {
  using Element = typename Math::Element;
  using Query = typename Math::Query;
  using Weights = typename Math::Weights;
  static_assert(kChunk % Math::kKeys == 0, "groups of keys fill a chunk");
  static_assert(kChunk % Math::kValues == 0, "groups of values fill a chunk");

 public:
  // behind: the part that comes after the one that runs, or null.
  FewRows(const PagedAttentionArgs& args, std::function<const Part*()> behind)
      : args_(args),
        ahead_(args, sizeof(Element), rows_ahead(args), std::move(behind)),
        group_(args.heads / args.kv_heads),
        dim_(padded<Math::kWide>(args.head_dim)),
        value_dim_(padded<Math::kWide>(args.value_dim)),
        is_whole_(dim_ == args.head_dim && value_dim_ == args.value_dim) {
    scratch_.take(queries_, args.kv_heads * kMostRows * dim_);
    for (auto* state : {&now_, &all_}) {
      scratch_.take(state->sums, args.kv_heads * kMostRows * value_dim_);
      scratch_.take(state->running, args.kv_heads * kMostRows);
    }
    scratch_.take(rows_, args.kv_heads * kMostRows);
    scratch_.take(scores_, args.kv_heads * kMostRows * kChunk);
    if constexpr (Math::kInPlace)
      weights_ = reinterpret_cast<Weights*>(scores_);
    else
      scratch_.take(weights_, args.kv_heads * kMostRows);
    if (args.key_scale.data) {
      scratch_.take(key_scales_, args.kv_heads * kChunk);
      scratch_.take(value_scales_, args.kv_heads * kChunk);
    }
    scratch_.take(copies_, std::max(Math::kKeys, Math::kValues) * std::max(dim_, value_dim_));
    spoilt_.take(scratch_, args.kv_heads, value_dim_);
  }

  // Adds what the part's rows see among the part's keys, segment by segment: each begins anew and
  // is then folded, so that it makes no difference which thread takes which segments.
  void run(const Part& part, const Results& results) {
    const Request request(args_, part.request);
    Keys chunk;
    chunk.fill(request, part.keys.begin, part.keys.end);
    if (ahead_.begin(part)) ask_for_start();
    prepare(part, request);
    const int64_t segments = part.segments();
    for (int64_t s = 0; s < segments; ++s) {
      chunk = run_segment(part, part.segment(s), request, chunk);
      if (!part.is_alone())
        finish(part, s, now_, results);
      else if (s)
        fold_all();
      else
        std::swap(now_, all_);
    }
    if (part.is_alone()) finish(part, 0, all_, results);
  }

 private:
  using Keys = Chunk<kChunk>;

  // What the rows of all heads have seen: sums [rows, value_dim] and their softmax.
  struct State {
    float* sums;
    Running* running;
  };

  // Starts with the segment's first chunk, returns the first one behind it.
  Keys run_segment(const Part& part, Span keys, const Request& request, const Keys& first) {
    Keys behind;
    spoilt_.wanted = false;
    do {
      forget();
      by_rows([&](auto rows) { behind = run_rows<rows>(part, keys.end, request, first); });
    } while (is_to_repeat(part, keys, request));
    return behind;
  }

  void forget() {
    std::fill_n(now_.running, args_.kv_heads * count_, Running{});
    std::fill_n(now_.sums, args_.kv_heads * count_ * value_dim_, 0.0f);
  }

  void fold_all() {
    for (int64_t at = 0; at < args_.kv_heads * count_; ++at)
      fold(now_.running[at], now_.sums + at * value_dim_, value_dim_, all_.running[at],
           all_.sums + at * value_dim_);
  }

  // Rows come in blocks of 1 to 4; where there are more than 4, the last block is filled up.
  void prepare(const Part& part, const Request& request) {
    used_ = part.row_end - part.row_begin;
    count_ = used_ <= kRowsAtOnce ? used_ : padded<kRowsAtOnce>(used_);
    for (int64_t h = 0; h < args_.kv_heads; ++h) {
      for (int64_t j = 0; j < count_; ++j) {
        const int64_t at = h * count_ + j, row = (part.row_begin + j) / group_;
        const int64_t head = h * group_ + (part.row_begin + j) % group_;
        if (j >= used_) {
          std::fill_n(queries_ + at * dim_, dim_, Query{});
          rows_[at] = {0, 0, {0, 0}};
          continue;
        }
        read_row(args_, args_.query, request.first + row, head, args_.head_dim,
                 queries_ + at * dim_, dim_);
        math_.arrange(queries_ + at * dim_, dim_);
        rows_[at] = {args_.alibi_slopes ? args_.alibi_slopes[head] : 0.0f, request.position(row),
                     request.seen(row)};
      }
    }
  }

  bool is_to_repeat(const Part& part, Span keys, const Request& request) {
    if (spoilt_.wanted || !part.hides(keys, request, group_)) return false;
    for (int64_t h = 0; h < args_.kv_heads; ++h)  // rows that are filled up see nothing
      spoilt_.wanted |= !all_finite(now_.sums + h * count_ * value_dim_, used_ * value_dim_);
    return spoilt_.wanted;
  }

  // Up to a segment's end.
  template <int rows>
  Keys run_rows(const Part& part, int64_t end, const Request& request, const Keys& first) {
    Keys chunks[2] = {first, first};
    int now = 0;
    for (; chunks[now].count > 0 && chunks[now].begin < end; now = 1 - now) {
      const Keys& chunk = chunks[now];
      Keys& next = chunks[1 - now];
      next.fill(request, chunk.begin + chunk.count, part.keys.end);
      const Stretch keys = stretch(args_.key_cache, chunk.key, chunk.count);
      const Stretch values = stretch(args_.value_cache, chunk.value, chunk.count);
      ask_for_scales(next);
      spoilt_.find(args_, 0, args_.kv_heads, chunk);
      all_products<rows>(chunk, keys);
      softmax<rows>(chunk);
      all_sums<rows>(chunk, values);
    }
    return chunks[now];
  }

  void ask_for_start() {
    for (int64_t row = ahead_.at_once(); row > 0; --row) {
      const Ahead at = ahead_.rows(1);
      for (int64_t d = 0; d < args_.head_dim; d += kLine / int64_t(sizeof(Element)))
        prefetch<1>(at + d * sizeof(Element));
    }
  }

  void ask_for_scales(const Keys& next) const {
    if (!args_.key_scale.data) return;
    for (int64_t t = 0; t < next.count; ++t) {
      ask_for_scale(args_.key_scale, next.key_scale[t]);
      ask_for_scale(args_.value_scale, next.value_scale[t]);
    }
  }
  static void ask_for_scale(const Pages& scales, int64_t offset) {
    prefetch<1>({static_cast<const char*>(scales.data) + offset * int64_t(sizeof(float)), false});
  }

  Stretch stretch(const Pages& pages, const int64_t* offsets, int64_t count) const {
    return {pages, offsets, count, args_.kv_heads, sizeof(Element)};
  }

  // Rows to ask for ahead: those that are taken together are asked for before the first is read.
  static int64_t rows_ahead(const PagedAttentionArgs& args) {
    const int64_t together = std::max(Math::kKeys, Math::kValues) * args.kv_heads;
    return together + args.forms.ahead_bytes / int64_t(args.head_dim * sizeof(Element));
  }

  // Calls body(head, token) for some tokens of a head at a time, in the order of addresses.
  template <int tokens, class Body>
  static void in_order(const Stretch& s, const Body& body) {
    if (s.by_token)
      for (int64_t t = 0; t < s.tokens; t += tokens)
        for (int64_t h = 0; h < s.heads; ++h) body(h, t);
    else
      for (int64_t h = 0; h < s.heads; ++h)
        for (int64_t t = 0; t < s.tokens; t += tokens) body(h, t);
  }

  template <int rows>
  void all_products(const Keys& chunk, const Stretch& keys) {
    ahead_.reading(keys.rows());
    in_order<Math::kKeys>(keys, [&](int64_t h, int64_t t) {
      const Element* tokens[Math::kKeys];
      head(args_.key_cache, h, chunk.key + t, args_.head_dim, dim_, tokens);
      const Ahead ahead = ahead_.rows(Math::kKeys);
      for (int64_t at = h * count_; at < (h + 1) * count_; at += rows)
        products<rows>(math_, queries_ + at * dim_, dim_, tokens, scores_ + at * kChunk + t, ahead);
    });
  }

  template <int rows>
  void all_sums(const Keys& chunk, const Stretch& values) {
    ahead_.reading(values.rows());
    in_order<Math::kValues>(values, [&](int64_t h, int64_t t) {
      const Element* tokens[Math::kValues];
      head(args_.value_cache, h, chunk.value + t, args_.value_dim, value_dim_, tokens);
      if (spoilt_.wanted)
        for (int i = 0; i < Math::kValues; ++i) tokens[i] = spoilt_.value(tokens[i], h, t + i);
      Ahead ahead[Math::kValues / Math::kRun];
      for (Ahead& run : ahead) run = ahead_.rows(Math::kRun);
      for (int64_t at = h * count_; at < (h + 1) * count_; at += rows)
        weighted_sums<rows>(math_, weights_ + at, t, tokens, now_.sums + at * value_dim_,
                            value_dim_, ahead);
    });
  }

  template <int rows>
  void softmax(const Keys& chunk) {
    if (key_scales_) {
      gather(args_.key_scale, 0, args_.kv_heads, chunk.key_scale, key_scales_);
      gather(args_.value_scale, 0, args_.kv_heads, chunk.value_scale, value_scales_);
      for (int64_t h = 0; h < args_.kv_heads; ++h) spoilt_.put(value_scales_ + h * kChunk, h, 0);
    }
    for (int64_t h = 0; h < args_.kv_heads; ++h) softmax<rows>(h, chunk);
  }

  template <int rows>
  void softmax(int64_t h, const Keys& chunk) {
    float factors[rows];
    const float* key_scales = key_scales_ ? key_scales_ + h * kChunk : nullptr;
    const float* value_scales = value_scales_ ? value_scales_ + h * kChunk : nullptr;
    const int64_t n = padded<kScoreStep>(chunk.count);
    for (int64_t at = h * count_; at < (h + 1) * count_; at += rows) {
      float* scores = scores_ + at * kChunk;
      Scored scored[rows];
      for (int r = 0; r < rows; ++r) spoilt_.put(scores + r * kChunk, h, NAN);
      for (int r = 0; r < rows; ++r)
        scored[r] = finish_scores(args_, rows_[at + r], chunk.begin, chunk.count, key_scales,
                                scores + r * kChunk);
      finish_weights(scored, n, scores, kChunk, now_.running + at, factors,
                     [&](int r, int64_t i, Floats w) {
                       if (value_scales) w *= load(value_scales + i);
                       math_.put(scores + r * kChunk, weights_[at + r], i, w);
                     });
      for (int r = 0; r < rows; ++r) {
        math_.settle(scores + r * kChunk, chunk.count, weights_[at + r]);
        if (factors[r] != 1) scale_all(factors[r], value_dim_, now_.sums + (at + r) * value_dim_);
      }
    }
  }

  // Rows of a head in the cache, or copies with zeros behind where rows are not whole vectors.
  template <int count>
  CA_INLINE void head(const Pages& pages, int64_t h, const int64_t* offsets, int64_t dim,
                      int64_t room, const Element* (&rows)[count]) {
    const Element* from = static_cast<const Element*>(pages.data) + h * pages.head;
    for (int i = 0; i < count; ++i) {
      rows[i] = from + offsets[i];
      if (is_whole_) continue;
      Element* copy = copies_ + i * room;
      std::memcpy(copy, rows[i], dim * sizeof(Element));
      std::fill(copy + dim, copy + room, Element{});
      rows[i] = copy;
    }
  }

  template <class Body>
  void by_rows(const Body& body) const {
    switch (std::min<int64_t>(count_, kRowsAtOnce)) {
      case 1:
        return body(std::integral_constant<int, 1>{});
      case 2:
        return body(std::integral_constant<int, 2>{});
      case 3:
        return body(std::integral_constant<int, 3>{});
      default:
        return body(std::integral_constant<int, 4>{});
    }
  }

  void finish(const Part& part, int64_t segment, const State& state, const Results& results) {
    for (int64_t h = 0; h < args_.kv_heads; ++h)
      for (int64_t j = 0; j < used_; ++j) {
        const int64_t at = h * count_ + j;
        math_.finish(state.sums + at * value_dim_, value_dim_);
        results.put(part, segment * part.rows() + h * used_ + j, state.sums + at * value_dim_,
                    state.running[at]);
      }
  }

  const PagedAttentionArgs& args_;
  Lookahead<kChunk> ahead_;
  Scratch scratch_;
  const Math math_{};
  int64_t group_, dim_, value_dim_, used_ = 0, count_ = 0;
  bool is_whole_;
  Query* queries_;
  State now_, all_;  // of a segment, of those before it
  float* scores_;
  Weights* weights_;
  ScoreRow* rows_;
  float *key_scales_ = nullptr, *value_scales_ = nullptr;  // of a chunk, [kv_heads, kChunk]
  Element* copies_;
  Spoilt<Element, kChunk> spoilt_;
};

}  // namespace compiled_attn
