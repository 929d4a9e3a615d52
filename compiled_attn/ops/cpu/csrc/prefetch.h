// Asking for memory before it is needed.
#pragma once

#include "request.h"

namespace compiled_attn {

constexpr int kLine = 64;  // bytes of a cache line

// The rows (one head of one token) of some tokens of a cache, in the order of their addresses.
struct Stretch {
  const char* data;
  const int64_t* offsets;  // of tokens, in elements
  int64_t tokens, heads, element_bytes, head_bytes;
  bool by_token;  // all heads of a token lie together, else all tokens of a head

  Stretch() : data(nullptr), offsets(nullptr), tokens(0), heads(0), by_token(true) {}
  Stretch(const Pages& pages, const int64_t* offsets_, int64_t tokens_, int64_t heads_,
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

// Goes over the rows of a stretch once.
class Walk {
 public:
  Walk() = default;
  explicit Walk(const Stretch& stretch) : stretch_(stretch), left_(stretch.rows()) { take_run(); }

  bool is_over() const { return left_ <= 0; }
  int64_t left() const { return left_; }
  const char* at() const { return at_; }

  // Passes some rows, which lie at equal distances but where `count` does not divide those of a
  // token; returns how many there were.
  CA_INLINE int64_t pass(int64_t count) {
    const int64_t passed = std::min(count, left_);
    at_ += count * stretch_.head_bytes, of_run_ -= count, left_ -= count;
    if (of_run_ <= 0 && left_ > 0) next_run();
    return passed;
  }

 private:
  // A run is the rows of a token, less those that were passed with the last one; or a row of a
  // head.
  void next_run() {
    if (stretch_.by_token)
      for (head_ = -of_run_, ++token_; head_ >= stretch_.heads; head_ -= stretch_.heads) ++token_;
    else
      for (token_ += 1 - of_run_; token_ >= stretch_.tokens; token_ -= stretch_.tokens) ++head_;
    take_run();
  }

  void take_run() {
    of_run_ = stretch_.by_token ? stretch_.heads - head_ : 1;
    at_ = left_ > 0 ? stretch_.at(token_, head_) : stretch_.data;
  }

  Stretch stretch_;
  const char* at_ = nullptr;
  int64_t left_ = 0, token_ = 0, head_ = 0, of_run_ = 0;
};

// What to ask for. What is on its way to the first level cache holds a place in the queue of its
// misses, which loads that are waited for need too: on a Zen 4 half the speed, elsewhere a gain.
struct Ahead {
  const char* at;
  bool near;  // into the first level cache, else the second

  CA_INLINE Ahead operator+(int64_t bytes) const { return {at + bytes, near}; }
};

template <int lines>
CA_INLINE void prefetch(Ahead ahead) {
  for (int i = 0; i < lines; ++i)
    if (ahead.near)
      __builtin_prefetch(ahead.at + i * kLine, 0, 3);
    else
      __builtin_prefetch(ahead.at + i * kLine, 0, 2);
}

template <class Element>
CA_INLINE void ask_for_row(const Pages& pages, int64_t head, int64_t offset, int64_t dim) {
  const auto* row = static_cast<const Element*>(pages.data) + offset + head * pages.head;
  for (int64_t d = 0; d < dim; d += kLine / int64_t(sizeof(Element)))
    prefetch<1>({reinterpret_cast<const char*>(row + d), false});
}

// A chunk that is read next: its keys and values of a head are asked for bit by bit.
template <class Element, int Capacity>
class NextChunk {
 public:
  void fill(const Request& request, int64_t from, int64_t to) {
    chunk_.fill(request, from, to);
    asked_ = 0;
  }

  const Chunk<Capacity>& chunk() const { return chunk_; }

  // Up to done / of.
  void ask(const PagedAttentionArgs& args, int64_t head, int64_t done, int64_t of) {
    for (const int64_t end = chunk_.count * done / of; asked_ < end; ++asked_) {
      ask_for_row<Element>(args.key_cache, head, chunk_.key[asked_], args.head_dim);
      ask_for_row<Element>(args.value_cache, head, chunk_.value[asked_], args.value_dim);
    }
  }

 private:
  Chunk<Capacity> chunk_;
  int64_t asked_ = 0;
};

}  // namespace compiled_attn
