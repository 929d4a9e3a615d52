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

// Walks over two stretches of rows, some rows ahead of what is read.
//
// Rows that follow each other are taken to lie together; where they do not, at the end of a block,
// some lines are asked for in vain.
class Prefetch {
 public:
  static constexpr int kLine = 64;  // bytes

  Prefetch(const Stretch& now, const Stretch& then, int64_t ahead) : now_(now), then_(then) {
    if (ahead >= now.rows()) {
      ahead = std::min(ahead - now.rows(), std::max<int64_t>(then.rows() - 1, 0));
      now_ = then;
    }
    const int64_t inside = now_.by_token ? now_.heads : now_.tokens;
    outer_ = inside ? ahead / inside : 0, inner_ = inside ? ahead % inside : 0;
  }

  // Where the next rows begin; at the end it stays.
  const char* rows(int64_t count) {
    if (!now_.rows()) return now_.data;
    const char* at = now_.by_token ? now_.at(outer_, inner_) : now_.at(inner_, outer_);
    inner_ += count;
    const int64_t inside = now_.by_token ? now_.heads : now_.tokens;
    while (inner_ >= inside) inner_ -= inside, ++outer_;
    if (outer_ >= now_.rows() / inside) now_ = then_, outer_ = inner_ = 0;
    return at;
  }

 private:
  Stretch now_, then_;
  int64_t inner_ = 0, outer_ = 0;
};

template <int lines>
CA_INLINE void prefetch(const char* at) {
  for (int i = 0; i < lines; ++i) __builtin_prefetch(at + i * Prefetch::kLine, 0, 3);
}

}  // namespace compiled_attn
