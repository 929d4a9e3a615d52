// Asking for memory before it is needed.
#pragma once

#include "abi.h"

namespace compiled_attn {

// The rows (one head of one token) of a chunk of a cache, asked for one after the other in address
// order, into the second level cache.
class Prefetch {
 public:
  Prefetch(const Pages& pages, const int64_t* offsets, int64_t tokens, int64_t heads,
           int64_t row_bytes, int64_t element_bytes)
      : data_(static_cast<const char*>(pages.data)),
        offsets_(offsets),
        head_stride_(pages.head),
        tokens_(tokens),
        heads_(heads),
        row_bytes_(row_bytes),
        element_bytes_(element_bytes),
        by_token_(pages.head <= pages.slot) {}

  void operator()(int rows) {
    for (; rows > 0 && token_ < tokens_ && head_ < heads_; --rows) {
      const char* row = data_ + (offsets_[token_] + head_ * head_stride_) * element_bytes_;
      for (int64_t byte = 0; byte < row_bytes_; byte += 64) __builtin_prefetch(row + byte, 0, 2);
      advance();
    }
  }

 private:
  void advance() {
    int64_t& inner = by_token_ ? head_ : token_;
    int64_t& outer = by_token_ ? token_ : head_;
    if (++inner == (by_token_ ? heads_ : tokens_)) inner = 0, ++outer;
  }

  const char* data_;
  const int64_t* offsets_;
  int64_t head_stride_, tokens_, heads_, row_bytes_, element_bytes_;
  int64_t token_ = 0, head_ = 0;
  bool by_token_;
};

}  // namespace compiled_attn
