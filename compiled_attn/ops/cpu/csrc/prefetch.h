// Asking for memory before it is needed.
#pragma once

#include "request.h"

namespace compiled_attn {

// The rows (one head of one token) of some tokens of a cache, in the order of their addresses.
struct Stretch {
  const char* data;
  const int64_t* offsets;  // of tokens, in elements
  int64_t tokens, heads, element_bytes, head_bytes;
  bool by_token;  // all heads of a token lie together, else all tokens of a head

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

// Walks over two stretches of rows, some rows ahead of what is read; then over the second again.
//
// The rows of a token lie at equal distances; where `count` does not divide them, some lines are
// asked for in vain.
class Prefetch {
 public:
  static constexpr int kLine = 64;  // bytes

  Prefetch(const Stretch& now, const Stretch& then, int64_t ahead) : now_(&now), then_(&then) {
    if (ahead >= now.rows()) {
      ahead = std::min(ahead - now.rows(), std::max<int64_t>(then.rows() - 1, 0));
      now_ = &then;
    }
    const int64_t heads = now_->heads, tokens = std::max<int64_t>(now_->tokens, 1);
    token_ = now_->by_token ? ahead / heads : ahead % tokens;
    head_ = now_->by_token ? ahead % heads : ahead / tokens;
    take_run();
  }

  // Where the next rows begin.
  CA_INLINE const char* rows(int64_t count) {
    const char* at = at_;
    at_ += count * now_->head_bytes, left_ -= count;
    if (left_ <= 0) next_run();
    return at;
  }

 private:
  // A run is the rows of a token, less those that were passed with the last one; or a row of a
  // head.
  void next_run() {
    if (now_->by_token) {
      for (head_ = -left_, ++token_; head_ >= now_->heads; head_ -= now_->heads) ++token_;
    } else if ((token_ += 1 - left_) >= now_->tokens) {
      token_ = 0, ++head_;
    }
    if (token_ >= now_->tokens || head_ >= now_->heads) now_ = then_, token_ = head_ = 0;
    take_run();
  }

  void take_run() {
    left_ = now_->by_token ? now_->heads - head_ : 1;
    at_ = now_->tokens ? now_->at(token_, head_) : now_->data;
  }

  const Stretch *now_, *then_;
  const char* at_;
  int64_t token_, head_, left_;  // and rows left in a run
};

// Into the second level cache: what is on its way to the first one holds a place in the queue of
// its misses, which loads that are waited for need too (on a Zen 4, half the speed).
template <int lines>
CA_INLINE void prefetch(const char* at) {
  for (int i = 0; i < lines; ++i) __builtin_prefetch(at + i * Prefetch::kLine, 0, 2);
}

}  // namespace compiled_attn
