// Software prefetch across the block table.
#pragma once

#include <functional>

#include "attention/request.h"

namespace compiled_attn {

constexpr int kLine = 64;  // bytes of a cache line

// The rows (one head of one token) of some tokens of a cache in address order.
struct CacheRows {
  const char* data;
  const int64_t* offsets;  // of tokens, in elements
  int64_t tokens, heads, element_bytes, head_bytes;
  bool by_token;  // all heads of a token are adjacent, else all tokens of a head

  CacheRows() : data(nullptr), offsets(nullptr), tokens(0), heads(0), by_token(true) {}
  CacheRows(const Pages& pages, const int64_t* offsets_, int64_t tokens_, int64_t heads_,
            int64_t bytes)
      : data(static_cast<const char*>(pages.data)),
        offsets(offsets_),
        tokens(tokens_),
        heads(heads_),
        element_bytes(bytes),
        head_bytes(pages.head * bytes),
        by_token(pages.head <= pages.slot) {}

  int64_t rows() const { return tokens * heads; }
  const char* at(int64_t token, int64_t head) const {
    return data + offsets[token] * element_bytes + head * head_bytes;
  }
};

// Iterates over cache rows once.
class CacheRowIterator {
 public:
  CacheRowIterator() = default;
  explicit CacheRowIterator(const CacheRows& rows) : rows_(rows), remaining_(rows.rows()) {
    take_run();
  }

  bool is_over() const { return remaining_ <= 0; }
  int64_t remaining() const { return remaining_; }
  const char* at() const { return at_; }

  // Advances by rows at equal distances (unless `count` does not divide a token's rows); returns
  // how many there were.
  CA_INLINE int64_t advance_by(int64_t count) {
    const int64_t advanced = std::min(count, remaining_);
    at_ += count * rows_.head_bytes, of_run_ -= count, remaining_ -= count;
    if (of_run_ <= 0 && remaining_ > 0) next_run();
    return advanced;
  }

 private:
  // A run is the remaining rows of a token, or one row of a head.
  void next_run() {
    if (rows_.by_token)
      for (head_ = -of_run_, ++token_; head_ >= rows_.heads; head_ -= rows_.heads) ++token_;
    else
      for (token_ += 1 - of_run_; token_ >= rows_.tokens; token_ -= rows_.tokens) ++head_;
    take_run();
  }

  void take_run() {
    of_run_ = rows_.by_token ? rows_.heads - head_ : 1;
    at_ = remaining_ > 0 ? rows_.at(token_, head_) : rows_.data;
  }

  CacheRows rows_;
  const char* at_ = nullptr;
  int64_t remaining_ = 0, token_ = 0, head_ = 0, of_run_ = 0;
};

// A prefetch into L1 occupies a miss buffer that demand loads need: it halves the speed on Zen 4
// and gains elsewhere.
struct PrefetchTarget {
  const char* at;
  bool l1;  // to L1, else to L2

  CA_INLINE PrefetchTarget operator+(int64_t bytes) const { return {at + bytes, l1}; }
};

template <int lines>
CA_INLINE void prefetch(PrefetchTarget ahead) {
  for (int i = 0; i < lines; ++i)
    if (ahead.l1)
      __builtin_prefetch(ahead.at + i * kLine, 0, 3);
    else
      __builtin_prefetch(ahead.at + i * kLine, 0, 2);
}

template <class Element>
CA_INLINE void prefetch_row(const Pages& pages, int64_t head, int64_t offset, int64_t dim) {
  const auto* row = static_cast<const Element*>(pages.data) + offset + head * pages.head;
  for (int64_t d = 0; d < dim; d += kLine / int64_t(sizeof(Element)))
    prefetch<1>({reinterpret_cast<const char*>(row + d), false});
}

// The next chunk; its keys and values are prefetched piece by piece.
template <class Element, int Capacity>
class NextChunk {
 public:
  void fill(const Request& request, int64_t from, int64_t to) {
    chunk_.fill(request, from, to);
    prefetched_ = 0;
  }

  const Chunk<Capacity>& chunk() const { return chunk_; }

  // Prefetches up to the share done / of.
  void prefetch(const PagedAttentionArgs& args, int64_t head, int64_t done, int64_t of) {
    for (const int64_t end = chunk_.count * done / of; prefetched_ < end; ++prefetched_) {
      prefetch_row<Element>(args.key_cache, head, chunk_.key[prefetched_], args.head_dim);
      prefetch_row<Element>(args.value_cache, head, chunk_.value[prefetched_], args.value_dim);
    }
  }

 private:
  Chunk<Capacity> chunk_;
  int64_t prefetched_ = 0;
};

// Prefetches keys and values of the chunks to come, `distance` rows (one head of one token) ahead,
// at the pace of reading. Continues into the next part, or memory would idle between parts.
template <int Capacity>
class Prefetcher {
 public:
  // peek: returns the part after the current one, or null
  Prefetcher(const PagedAttentionArgs& args, int64_t element_bytes, int64_t distance,
            std::function<const Part*()> peek)
      : args_(args), bytes_(element_bytes), distance_(distance), peek_(std::move(peek)) {}

  // Begins a part; returns true if none of it was prefetched.
  bool begin(const Part& part) {
    current_ = &part;
    is_over_ = false;
    if (part_ == &part) return false;
    lead_rows_ = 0;
    start_part(part);
    return true;
  }

  // Announces that rows are about to be read.
  void reading(int64_t rows) { lead_rows_ -= rows; }

  // The rows to prefetch while `count` rows are read.
  CA_INLINE PrefetchTarget rows(int64_t count) {
    const PrefetchTarget at{iterator_.at(), args_.tuning.prefetch_l1 != 0};
    if (lead_rows_ < distance_ && !is_over_) {
      lead_rows_ += iterator_.advance_by(count);
      if (iterator_.is_over()) advance();
    }
    return at;
  }

  // Rows to prefetch before the first read.
  int64_t rows_at_start() const { return std::min(distance_, iterator_.remaining()); }

 private:
  void start_part(const Part& part) {
    part_ = &part;
    chunk_.fill(Request(args_, part.request), part.keys.begin, part.keys.end);
    is_over_ = !chunk_.count;
    iterate(args_.key_cache, chunk_.key, false);
  }

  void advance() {
    if (!of_values_) return iterate(args_.value_cache, chunk_.value, true);
    chunk_.fill(Request(args_, part_->request), chunk_.begin + chunk_.count, part_->keys.end);
    if (chunk_.count) return iterate(args_.key_cache, chunk_.key, false);
    const Part* next = part_ == current_ ? peek_() : nullptr;
    is_over_ = !next;
    if (next) start_part(*next);
  }

  void iterate(const Pages& pages, const int64_t* offsets, bool of_values) {
    of_values_ = of_values;
    iterator_ = CacheRowIterator(CacheRows(pages, offsets, chunk_.count, args_.kv_heads, bytes_));
  }

  const PagedAttentionArgs& args_;
  int64_t bytes_, distance_, lead_rows_ = 0;
  std::function<const Part*()> peek_;
  const Part *part_ = nullptr, *current_ = nullptr;
  Chunk<Capacity> chunk_;
  bool of_values_ = false, is_over_ = true;
  CacheRowIterator iterator_;
};

}  // namespace compiled_attn
