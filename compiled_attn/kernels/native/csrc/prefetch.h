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
  // Rows at equal distances, and the distance in bytes.
  int64_t run() const { return by_token ? heads : 1; }
  int64_t step() const { return head_bytes; }
  const char* row(int64_t i) const {
    return by_token ? at(i / heads, i % heads) : at(i % tokens, i / tokens);
  }
  const char* at(int64_t token, int64_t head) const {
    return data + offsets[token] * element_bytes + head * head_bytes;
  }
};

// Walks over two stretches of rows, some rows ahead of what is read; then over the second again.
//
// The rows of a token, or of a head within a block, lie at equal distances; where `rows` are not a
// divisor of those, some lines are asked for in vain.
class Prefetch {
 public:
  static constexpr int kLine = 64;  // bytes

  Prefetch(const Stretch& now, const Stretch& then, int64_t ahead) : now_(&now), then_(&then) {
    if (ahead >= now.rows()) {
      ahead = std::min(ahead - now.rows(), std::max<int64_t>(then.rows() - 1, 0));
      now_ = &then;
    }
    row_ = ahead;
    begin_run();
  }

  // Where the next rows begin.
  CA_INLINE const char* rows(int64_t count) {
    const char* at = at_;
    at_ += count * step_, left_ -= count;
    if (left_ <= 0) next_run();
    return at;
  }

 private:
  __attribute__((noinline)) void next_run() {
    row_ = end_ - left_;
    if (row_ >= now_->rows()) now_ = then_, row_ = 0;
    begin_run();
  }

  void begin_run() {
    if (!now_->rows()) {
      at_ = now_->data, step_ = 0, left_ = end_ = INT64_MAX;
      return;
    }
    const int64_t run = now_->run();
    at_ = now_->row(row_), step_ = now_->step();
    left_ = run - row_ % run, end_ = row_ + left_;
  }

  const Stretch *now_, *then_;
  const char* at_;
  int64_t row_, step_, left_, end_;  // bytes from row to row, rows left in a run, and its end
};

template <int lines>
CA_INLINE void prefetch(const char* at) {
  for (int i = 0; i < lines; ++i) __builtin_prefetch(at + i * Prefetch::kLine, 0, 3);
}

}  // namespace compiled_attn
