// Decode: few query rows against many keys, limited by memory bandwidth.
//
// Reads keys and values once for all query heads of their group, a chunk of tokens at a time,
// straight from the cache. Prefetches KernelTuning::prefetch_bytes target in address order, across
// the block table and into the next part, since the hardware cannot predict the next block.
#pragma once

#include "attention/decode_int8.h"
#include "attention/nonfinite_guard.h"
#include "attention/rows.h"

namespace compiled_attn {

constexpr int kRowBlock = 4;  // query rows that share a key in registers
constexpr int kMaxDecodeRows = 32;  // per KV head

template <class Math>
class DecodeKernel {
  using Element = typename Math::Element;
  using Query = typename Math::Query;
  using Weights = typename Math::Weights;
  static_assert(kChunk == kSegmentUnit, "segments are whole chunks");
  static_assert(kChunk % Math::kKeys == 0, "groups of keys fill a chunk");
  static_assert(kChunk % Math::kValues == 0, "groups of values fill a chunk");

 public:
  // peek: returns the part after the current one, or null
  DecodeKernel(const PagedAttentionArgs& args, std::function<const Part*()> peek)
      : args_(args),
        prefetcher_(args, sizeof(Element), rows_ahead(args), std::move(peek)),
        group_(args.heads / args.kv_heads),
        dim_(padded<Math::kStep>(args.head_dim)),
        value_dim_(padded<Math::kStep>(args.value_dim)),
        is_whole_(dim_ == args.head_dim && value_dim_ == args.value_dim) {
    scratch_.take(queries_, args.kv_heads * kMaxDecodeRows * dim_);
    for (auto* state : {&segment_, &merged_}) {
      scratch_.take(state->sums, args.kv_heads * kMaxDecodeRows * value_dim_);
      scratch_.take(state->states, args.kv_heads * kMaxDecodeRows);
    }
    scratch_.take(rows_, args.kv_heads * kMaxDecodeRows);
    scratch_.take(scores_, args.kv_heads * kMaxDecodeRows * kChunk);
    if constexpr (Math::kInPlace)
      weights_ = reinterpret_cast<Weights*>(scores_);
    else
      scratch_.take(weights_, args.kv_heads * kMaxDecodeRows);
    if (args.key_scale.data) {
      scratch_.take(key_scales_, args.kv_heads * kChunk);
      scratch_.take(value_scales_, args.kv_heads * kChunk);
    }
    scratch_.take(copies_, std::max(Math::kKeys, Math::kValues) * std::max(dim_, value_dim_));
    guard_.take(scratch_, args.kv_heads, value_dim_);
  }

  // Attends the part's rows to its keys, segment by segment. Each segment starts from an empty
  // softmax and is then merged, so the bits do not depend on which thread takes it.
  void run(const Part& part, const Results& results) {
    const Request request(args_, part.request);
    Keys chunk;
    chunk.fill(request, part.keys.begin, part.keys.end);
    if (prefetcher_.begin(part)) prefetch_start();
    prepare(part, request);
    const int64_t segments = part.segments();
    for (int64_t s = 0; s < segments; ++s) {
      chunk = run_segment(part, part.segment(s), request, chunk);
      if (!part.covers_all_keys())
        finish(part, s, segment_, results);
      else if (s)
        merge_segment();
      else
        std::swap(segment_, merged_);
    }
    if (part.covers_all_keys()) finish(part, 0, merged_, results);
  }

 private:
  using Keys = Chunk<kChunk>;

  // Per row: weighted sum [value_dim] and softmax state.
  struct State {
    float* sums;
    SoftmaxState* states;
  };

  // Starts with the segment's first chunk; returns the first chunk of the next segment.
  Keys run_segment(const Part& part, Span keys, const Request& request, const Keys& first) {
    Keys next;
    guard_.active = false;
    do {
      reset();
      by_rows([&](auto rows) { next = run_rows<rows>(part, keys.end, request, first); });
    } while (needs_second_pass(part, keys, request));
    return next;
  }

  void reset() {
    std::fill_n(segment_.states, args_.kv_heads * count_, SoftmaxState{});
    std::fill_n(segment_.sums, args_.kv_heads * count_ * value_dim_, 0.0f);
  }

  void merge_segment() {
    for (int64_t at = 0; at < args_.kv_heads * count_; ++at)
      merge_softmax(segment_.states[at], segment_.sums + at * value_dim_, value_dim_,
                    merged_.states[at], merged_.sums + at * value_dim_);
  }

  // Rows come in blocks of 1 to 4; beyond 4, the last block is padded.
  void prepare(const Part& part, const Request& request) {
    row_count_ = part.row_end - part.row_begin;
    count_ = row_count_ <= kRowBlock ? row_count_ : padded<kRowBlock>(row_count_);
    for (int64_t h = 0; h < args_.kv_heads; ++h) {
      for (int64_t j = 0; j < count_; ++j) {
        const int64_t at = h * count_ + j, row = (part.row_begin + j) / group_;
        const int64_t head = h * group_ + (part.row_begin + j) % group_;
        if (j >= row_count_) {
          std::fill_n(queries_ + at * dim_, dim_, Query{});
          rows_[at] = {0, 0, {0, 0}};
          continue;
        }
        read_row(args_, args_.query, request.first + row, head, args_.head_dim,
                 queries_ + at * dim_, dim_);
        math_.arrange(queries_ + at * dim_, dim_);
        rows_[at] = {args_.alibi_slopes ? args_.alibi_slopes[head] : 0.0f, request.position(row),
                     request.visible(row)};
      }
    }
  }

  bool needs_second_pass(const Part& part, Span keys, const Request& request) {
    if (guard_.active || !part.is_partly_masked(keys, request, group_)) return false;
    for (int64_t h = 0; h < args_.kv_heads; ++h)  // padding rows see nothing
      guard_.active |=
          !all_finite(segment_.sums + h * count_ * value_dim_, row_count_ * value_dim_);
    return guard_.active;
  }

  // Processes chunks up to the end of a segment.
  template <int rows>
  Keys run_rows(const Part& part, int64_t end, const Request& request, const Keys& first) {
    Keys chunks[2] = {first, first};
    int now = 0;
    for (; chunks[now].count > 0 && chunks[now].begin < end; now = 1 - now) {
      const Keys& chunk = chunks[now];
      Keys& next = chunks[1 - now];
      next.fill(request, chunk.begin + chunk.count, part.keys.end);
      const CacheRows keys = cache_rows(args_.key_cache, chunk.key, chunk.count);
      const CacheRows values = cache_rows(args_.value_cache, chunk.value, chunk.count);
      prefetch_scales(next);
      guard_.find(args_, 0, args_.kv_heads, chunk);
      multiply_keys<rows>(chunk, keys);
      softmax<rows>(chunk);
      multiply_values<rows>(chunk, values);
    }
    return chunks[now];
  }

  void prefetch_start() {
    for (int64_t row = prefetcher_.rows_at_start(); row > 0; --row) {
      const PrefetchTarget at = prefetcher_.rows(1);
      for (int64_t d = 0; d < args_.head_dim; d += kLine / int64_t(sizeof(Element)))
        prefetch<1>(at + d * sizeof(Element));
    }
  }

  void prefetch_scales(const Keys& next) const {
    if (!args_.key_scale.data) return;
    for (int64_t t = 0; t < next.count; ++t) {
      prefetch_scale(args_.key_scale, next.key_scale[t]);
      prefetch_scale(args_.value_scale, next.value_scale[t]);
    }
  }
  static void prefetch_scale(const Pages& scales, int64_t offset) {
    prefetch<1>({static_cast<const char*>(scales.data) + offset * int64_t(sizeof(float)), false});
  }

  CacheRows cache_rows(const Pages& pages, const int64_t* offsets, int64_t count) const {
    return {pages, offsets, count, args_.kv_heads, sizeof(Element)};
  }

  // Prefetch distance in rows; rows processed together are prefetched before the first is read.
  static int64_t rows_ahead(const PagedAttentionArgs& args) {
    const int64_t together = std::max(Math::kKeys, Math::kValues) * args.kv_heads;
    return together + args.tuning.prefetch_bytes / int64_t(args.head_dim * sizeof(Element));
  }

  // Calls body(head, token) for groups of tokens in address order.
  template <int tokens, class Body>
  static void in_order(const CacheRows& s, const Body& body) {
    if (s.by_token)
      for (int64_t t = 0; t < s.tokens; t += tokens)
        for (int64_t h = 0; h < s.heads; ++h) body(h, t);
    else
      for (int64_t h = 0; h < s.heads; ++h)
        for (int64_t t = 0; t < s.tokens; t += tokens) body(h, t);
  }

  template <int rows>
  void multiply_keys(const Keys& chunk, const CacheRows& keys) {
    prefetcher_.reading(keys.rows());
    in_order<Math::kKeys>(keys, [&](int64_t h, int64_t t) {
      const Element* tokens[Math::kKeys];
      head(args_.key_cache, h, chunk.key + t, args_.head_dim, dim_, tokens);
      const PrefetchTarget target = prefetcher_.rows(Math::kKeys);
      for (int64_t at = h * count_; at < (h + 1) * count_; at += rows)
        products<rows>(math_, queries_ + at * dim_, dim_, tokens, scores_ + at * kChunk + t,
                       target);
    });
  }

  template <int rows>
  void multiply_values(const Keys& chunk, const CacheRows& values) {
    prefetcher_.reading(values.rows());
    in_order<Math::kValues>(values, [&](int64_t h, int64_t t) {
      const Element* tokens[Math::kValues];
      head(args_.value_cache, h, chunk.value + t, args_.value_dim, value_dim_, tokens);
      if (guard_.active)
        for (int i = 0; i < Math::kValues; ++i) tokens[i] = guard_.value(tokens[i], h, t + i);
      PrefetchTarget target[Math::kValues / Math::kRun];
      for (PrefetchTarget& run : target) run = prefetcher_.rows(Math::kRun);
      for (int64_t at = h * count_; at < (h + 1) * count_; at += rows)
        weighted_sums<rows>(math_, weights_ + at, t, tokens, segment_.sums + at * value_dim_,
                            value_dim_, target);
    });
  }

  template <int rows>
  void softmax(const Keys& chunk) {
    if (key_scales_) {
      gather(args_.key_scale, 0, args_.kv_heads, chunk.key_scale, key_scales_);
      gather(args_.value_scale, 0, args_.kv_heads, chunk.value_scale, value_scales_);
      for (int64_t h = 0; h < args_.kv_heads; ++h) guard_.put(value_scales_ + h * kChunk, h, 0);
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
      ScoreStats scored[rows];
      for (int r = 0; r < rows; ++r) guard_.put(scores + r * kChunk, h, NAN);
      for (int r = 0; r < rows; ++r)
        scored[r] = finish_scores(args_, rows_[at + r], chunk.begin, chunk.count, key_scales,
                                scores + r * kChunk);
      softmax_weights(scored, n, scores, kChunk, segment_.states + at, factors,
                     [&](int r, int64_t i, Floats w) {
                       if (value_scales) w *= load(value_scales + i);
                       math_.put(scores + r * kChunk, weights_[at + r], i, w);
                     });
      for (int r = 0; r < rows; ++r) {
        math_.settle(scores + r * kChunk, chunk.count, weights_[at + r]);
        if (factors[r] != 1)
          scale_all(factors[r], value_dim_, segment_.sums + (at + r) * value_dim_);
      }
    }
  }

  // Rows of a head in the cache, or zero-padded copies where rows are not whole vectors.
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
    if (count_ == 1) return body(std::integral_constant<int, 1>{});
    if (count_ == 2) return body(std::integral_constant<int, 2>{});
    if (count_ == 3) return body(std::integral_constant<int, 3>{});
    body(std::integral_constant<int, kRowBlock>{});
  }

  void finish(const Part& part, int64_t segment, const State& state, const Results& results) {
    for (int64_t h = 0; h < args_.kv_heads; ++h)
      for (int64_t j = 0; j < row_count_; ++j) {
        const int64_t at = h * count_ + j;
        math_.finish(state.sums + at * value_dim_, value_dim_);
        results.put(part, segment * part.rows() + h * row_count_ + j, state.sums + at * value_dim_,
                    state.states[at]);
      }
  }

  const PagedAttentionArgs& args_;
  Prefetcher<kChunk> prefetcher_;
  Scratch scratch_;
  const Math math_{};
  int64_t group_, dim_, value_dim_, row_count_ = 0, count_ = 0;
  bool is_whole_;
  Query* queries_;
  State segment_, merged_;  // of this segment, of the segments before it
  float* scores_;
  Weights* weights_;
  ScoreRow* rows_;
  float *key_scales_ = nullptr, *value_scales_ = nullptr;  // [kv_heads, kChunk]
  Element* copies_;
  NonFiniteGuard<Element, kChunk> guard_;
};

}  // namespace compiled_attn
