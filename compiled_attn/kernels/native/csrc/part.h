// A part of a step's work, and what it leaves behind.
#pragma once

#include "request.h"
#include "scores.h"

namespace compiled_attn {

// Some rows of some KV heads of a request against some of its keys.
struct Part {
  int64_t request;
  int64_t kv_begin, kv_end;
  int64_t row_begin, row_end;  // of each KV head's group, folded: row * group + head
  Span keys;
  int64_t results;  // where its first row stands in the results

  int64_t rows() const { return (kv_end - kv_begin) * (row_end - row_begin); }
};

// Of each row of all parts: a weighted sum of values, its largest score, its sum of weights.
struct Results {
  float* sums;  // [rows, value_dim]
  Running* running;
  int64_t value_dim;

  void put(int64_t row, const float* sum, const Running& state) const {
    std::copy_n(sum, value_dim, sums + row * value_dim);
    running[row] = state;
  }
};

}  // namespace compiled_attn
