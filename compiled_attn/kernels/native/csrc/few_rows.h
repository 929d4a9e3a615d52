// Few query rows against many keys: a race against memory.
//
// Keys and values are read once for all query heads of their group, a chunk of tokens at a time,
// straight from the cache. While a chunk is computed, the next one is prefetched line by line in
// address order, across the block table: the hardware does not know where the next block lies.
#pragma once

#include "bfloat16_dot.h"
#include "elements.h"
#include "prefetch.h"
#include "rows.h"
#include "part.h"
#include "scratch.h"

namespace compiled_attn {

constexpr int kChunk = 32;      // tokens
constexpr int kRowsAtOnce = 4;  // query rows that share a key in registers
constexpr int kMostRows = 32;   // query rows of one KV head

static_assert(kChunk % kLanes == 0, "a chunk is whole vectors");

// How queries meet keys and weights meet values, any element type, in float32.
template <class Element_>
struct InFloats {
  using Element = Element_;
  using Query = float;   // what a query is kept as
  using Weight = float;  // what a weight is kept as
  using Keys = Floats;
  static constexpr int kWide = kLanes;  // elements of a key that one step takes
  static constexpr int kTokens = 1;     // tokens that a step over values takes

  CA_INLINE static Floats key(const Element* at) { return load(at); }
  CA_INLINE static Floats query(const float* at) { return load(at); }
  CA_INLINE static Floats dot(Floats sum, Floats key, Floats query) { return sum + key * query; }

  template <int width>
  CA_INLINE static void values(const Element* const* tokens, Floats (&out)[width]) {
    for (int w = 0; w < width; ++w) out[w] = load(tokens[0] + w * kLanes);
  }
  CA_INLINE static Floats weight(const float* at) { return all(*at); }
  static const float* weights(float* weights, int64_t, float*) { return weights; }
  static void finish(float*, int64_t) {}
};

#if CA_HAS_BFLOAT16_DOT
// The same in products of pairs of bfloat16 that are added up in float32.
struct InPairs {
  using Element = BFloat16;
  using Query = BFloat16;
  using Weight = BFloat16;
  using Keys = Pairs;
  static constexpr int kWide = 2 * kLanes;
  static constexpr int kTokens = 2;

  CA_INLINE static Pairs key(const BFloat16* at) { return pairs_at(at); }
  CA_INLINE static Pairs query(const BFloat16* at) { return pairs_at(at); }
  CA_INLINE static Floats dot(Floats sum, Pairs key, Pairs query) {
    return add_products(sum, key, query);
  }

  // Two tokens zipped, elements in the order that zipping leaves them in: see `finish`.
  template <int width>
  CA_INLINE static void values(const BFloat16* const* tokens, Pairs (&out)[width]) {
    for (int w = 0; w < width; w += 2)
      zip(pairs_at(tokens[0] + w * kLanes), pairs_at(tokens[1] + w * kLanes), out[w], out[w + 1]);
  }
  CA_INLINE static Pairs weight(const BFloat16* at) { return same_pair(at); }
  static const BFloat16* weights(float* weights, int64_t n, BFloat16* out) {
    for (int64_t i = 0; i < n; i += kLanes) store(out + i, load(weights + i));
    return out;
  }
  static void finish(float* sums, int64_t dim) {
    for (int64_t d = 0; d < dim; d += 2 * kLanes) in_order(sums + d);
  }
};
#endif

// Products of `rows` queries [rows, dim] with a head of the chunk's keys: out [rows, kChunk].
template <class Math, int rows>
void products(const typename Math::Query* query, int64_t dim, const typename Math::Element* keys,
              const int64_t* offsets, int64_t count, float* out, Prefetch& prefetch) {
  for (int64_t t = 0; t < count; t += 4) {
    prefetch(4);
    Floats sum[rows][4] = {};
    for (int64_t d = 0; d < dim; d += Math::kWide) {
      typename Math::Keys key[4];
      for (int i = 0; i < 4; ++i) key[i] = Math::key(keys + offsets[t + i] + d);
      for (int r = 0; r < rows; ++r) {
        const auto q = Math::query(query + r * dim + d);
        for (int i = 0; i < 4; ++i) sum[r][i] = Math::dot(sum[r][i], key[i], q);
      }
    }
    for (int r = 0; r < rows; ++r)
      store(out + r * kChunk + t, sums(sum[r][0], sum[r][1], sum[r][2], sum[r][3]));
  }
}

// sums [rows, dim] = sums * factor + weights [rows, kChunk] x values, `width` vectors of each row.
template <class Math, int rows, int width>
void add_slice(const typename Math::Weight* weights, const float* factor,
               const typename Math::Element* values, const int64_t* offsets, int64_t count,
               float* sums, int64_t dim, Prefetch& prefetch) {
  const int share = int((4 * width * kLanes + dim - 1) / dim);  // all slices together: a row a token
  Floats sum[rows][width];
  for (int r = 0; r < rows; ++r)
    for (int w = 0; w < width; ++w)
      sum[r][w] = load(sums + r * dim + w * kLanes) * all(factor[r]);
  for (int64_t t = 0; t < count; t += Math::kTokens) {
    if (t % 4 == 0) prefetch(share);
    const typename Math::Element* tokens[Math::kTokens];
    for (int i = 0; i < Math::kTokens; ++i) tokens[i] = values + offsets[t + i];
    typename Math::Keys value[width];
    Math::values(tokens, value);
    for (int r = 0; r < rows; ++r) {
      const auto weight = Math::weight(weights + r * kChunk + t);
      for (int w = 0; w < width; ++w) sum[r][w] = Math::dot(sum[r][w], value[w], weight);
    }
  }
  for (int r = 0; r < rows; ++r)
    for (int w = 0; w < width; ++w) store(sums + r * dim + w * kLanes, sum[r][w]);
}

template <class Math, int rows>
void add_values(const typename Math::Weight* weights, const float* factor,
                const typename Math::Element* values, const int64_t* offsets, int64_t count,
                float* sums, int64_t dim, Prefetch& prefetch) {
  constexpr int step = Math::kWide / kLanes, width = kRegisters == 32 ? 4 : 2;
  int64_t d = 0;
  for (; d + width * kLanes <= dim; d += width * kLanes)
    add_slice<Math, rows, width>(weights, factor, values + d, offsets, count, sums + d, dim, prefetch);
  for (; d < dim; d += step * kLanes)
    add_slice<Math, rows, step>(weights, factor, values + d, offsets, count, sums + d, dim, prefetch);
}

template <class Math>
class FewRows {
  using Element = typename Math::Element;
  using Query = typename Math::Query;

 public:
  explicit FewRows(const PagedAttentionArgs& args)
      : args_(args),
        group_(args.heads / args.kv_heads),
        dim_(padded<Math::kWide>(args.head_dim)),
        value_dim_(padded<Math::kWide>(args.value_dim)),
        is_whole_(dim_ == args.head_dim && value_dim_ == args.value_dim) {
    scratch_.take(queries_, args.kv_heads * kMostRows * dim_);
    scratch_.take(sums_, args.kv_heads * kMostRows * value_dim_);
    scratch_.take(running_, args.kv_heads * kMostRows);
    scratch_.take(rows_, args.kv_heads * kMostRows);
    scratch_.take(scores_, kMostRows * kChunk);
    scratch_.take(weights_, kMostRows * kChunk);
    scratch_.take(copies_, is_whole_ ? 0 : kChunk * std::max(dim_, value_dim_));
  }

  // Adds what the part's rows see among the part's keys.
  void run(const Part& part, const Results& results) {
    const Request request(args_, part.request);
    count_ = part.row_end - part.row_begin;
    prepare(part, request);
    Chunk<kChunk> chunk, next;
    next.fill(request, part.keys.begin, part.keys.end);
    while (next.count > 0) {
      chunk = next;
      const int64_t end = chunk.begin + chunk.count;
      next.fill(request, end, part.keys.end);
      take(chunk, next);
    }
    finish(part, results);
  }

 private:
  void prepare(const Part& part, const Request& request) {
    for (int64_t h = 0; h < args_.kv_heads; ++h) {
      for (int64_t j = 0; j < count_; ++j) {
        const int64_t at = h * count_ + j, row = (part.row_begin + j) / group_;
        const int64_t head = h * group_ + (part.row_begin + j) % group_;
        read_row(args_, args_.query, request.first + row, head, args_.head_dim, true, queries_ + at * dim_, dim_);
        rows_[at] = {args_.alibi_slopes ? args_.alibi_slopes[head] : 0.0f, request.position(row),
                     request.seen(row)};
        running_[at] = {};
      }
    }
    std::fill_n(sums_, args_.kv_heads * count_ * value_dim_, 0.0f);
  }

  void take(const Chunk<kChunk>& chunk, const Chunk<kChunk>& next) {
    Prefetch keys(args_.key_cache, next.key, next.count, args_.kv_heads, args_.head_dim * sizeof(Element), sizeof(Element));
    Prefetch values(args_.value_cache, next.value, next.count, args_.kv_heads, args_.value_dim * sizeof(Element), sizeof(Element));
    for (int64_t h = 0; h < args_.kv_heads; ++h) {
      head_scores(h, chunk, keys);
      head_values(h, chunk, values);
    }
  }

  void head_scores(int64_t h, const Chunk<kChunk>& chunk, Prefetch& prefetch) {
    const Head keys = head(args_.key_cache, h, chunk.key, chunk.count, args_.head_dim, dim_);
    const Query* query = queries_ + h * count_ * dim_;
    for (int64_t j = 0; j < count_; j += kRowsAtOnce) {
      by_rows(std::min<int64_t>(count_ - j, kRowsAtOnce), [&](auto rows) {
        products<Math, rows>(query + j * dim_, dim_, keys.data, keys.offsets, chunk.count,
                             scores_ + j * kChunk, prefetch);
      });
    }
  }

  void head_values(int64_t h, const Chunk<kChunk>& chunk, Prefetch& prefetch) {
    float scales[2][kChunk], factor[kMostRows];
    const float* key_scales = gathered(args_.key_scale, h, chunk.key_scale, scales[0]);
    const float* value_scales = gathered(args_.value_scale, h, chunk.value_scale, scales[1]);
    for (int64_t j = 0; j < count_; ++j) {
      float* scores = scores_ + j * kChunk;
      const float most = finish_scores(args_, rows_[h * count_ + j], chunk.begin, chunk.count, key_scales, scores);
      const int64_t n = padded<kLanes>(chunk.count);
      factor[j] = running_[h * count_ + j].take(most, n, scores);
      if (value_scales)
        for (int64_t i = 0; i < n; i += kLanes) store(scores + i, load(scores + i) * load(value_scales + i));
    }
    const Head values = head(args_.value_cache, h, chunk.value, chunk.count, args_.value_dim, value_dim_);
    const auto* weights = Math::weights(scores_, count_ * kChunk, weights_);
    float* sums = sums_ + h * count_ * value_dim_;
    for (int64_t j = 0; j < count_; j += kRowsAtOnce) {
      by_rows(std::min<int64_t>(count_ - j, kRowsAtOnce), [&](auto rows) {
        add_values<Math, rows>(weights + j * kChunk, factor + j, values.data, values.offsets,
                               chunk.count, sums + j * value_dim_, value_dim_, prefetch);
      });
    }
  }

  struct Head {
    const Element* data;
    const int64_t* offsets;
  };

  // The rows of a head in the cache, or copies with zeros behind, where rows are not whole vectors.
  Head head(const Pages& pages, int64_t h, const int64_t* offsets, int64_t count, int64_t dim, int64_t to) {
    const Element* from = static_cast<const Element*>(pages.data) + h * pages.head;
    if (is_whole_) return {from, offsets};
    for (int64_t t = 0; t < kChunk; ++t) {
      copy_offsets_[t] = t * to;
      if (t >= padded<4>(count)) continue;
      std::memcpy(copies_ + t * to, from + offsets[t], dim * sizeof(Element));
      std::memset(copies_ + t * to + dim, 0, (to - dim) * sizeof(Element));
    }
    return {copies_, copy_offsets_};
  }

  template <class Body>
  static void by_rows(int64_t rows, const Body& body) {
    switch (rows) {
      case 1: return body(std::integral_constant<int, 1>{});
      case 2: return body(std::integral_constant<int, 2>{});
      case 3: return body(std::integral_constant<int, 3>{});
      default: return body(std::integral_constant<int, 4>{});
    }
  }

  void finish(const Part& part, const Results& results) {
    for (int64_t at = 0; at < args_.kv_heads * count_; ++at) {
      Math::finish(sums_ + at * value_dim_, value_dim_);
      results.put(part.results + at, sums_ + at * value_dim_, running_[at]);
    }
  }

  const PagedAttentionArgs& args_;
  Scratch scratch_;
  int64_t group_, dim_, value_dim_, count_ = 0;
  bool is_whole_;
  Query* queries_;
  float *sums_, *scores_;
  typename Math::Weight* weights_;
  Running* running_;
  ScoreRow* rows_;
  Element* copies_;
  int64_t copy_offsets_[kChunk];
};

}  // namespace compiled_attn
