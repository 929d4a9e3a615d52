// From weighted sums to rows of the output.
#pragma once

#include "part.h"
#include "rows.h"

namespace compiled_attn {

// Row `at` of the output, [tokens * heads]: a weighted sum of values and its softmax, which sinks
// are added to.
inline void write_output(const PagedAttentionArgs& args, int64_t at, const float* sums,
                         const Running& state) {
  const float sink = args.sinks ? args.sinks[at % args.heads] : -INFINITY;
  const float maximum = std::max(state.maximum, sink);
  const float origin = maximum == -INFINITY ? 0.0f : maximum;
  const float factor = state.maximum == origin ? 1.0f : std::exp(state.maximum - origin);
  const float total = state.total * factor + (args.sinks ? std::exp(sink - origin) : 0.0f);
  args.lse[at] = origin + std::log(total);  // -inf for the empty sum
  const float weight = total == 0 ? 0.0f : factor / total;
  by_dtype(args.query_dtype, [&](auto* type) {
    auto* out = static_cast<decltype(type)>(args.out) + at * args.value_dim;
    if (weight == 0)  // nothing seen is zero, whatever 0 times the values came to
      return std::fill_n(out, args.value_dim, std::remove_pointer_t<decltype(type)>{}), void();
    for (int64_t d = 0; d < args.value_dim; ++d) from_float(sums[d] * weight, out + d);
  });
}

// Tokens of no request: zero, whatever the sinks are.
inline void write_nothing(const PagedAttentionArgs& args, int64_t token) {
  by_dtype(args.query_dtype, [&](auto* type) {
    const int64_t row = args.heads * args.value_dim;
    std::fill_n(static_cast<decltype(type)>(args.out) + token * row, row,
                std::remove_pointer_t<decltype(type)>{});
  });
  for (int64_t head = 0; head < args.heads; ++head)
    args.lse[token * args.heads + head] = args.sinks ? args.sinks[head] : -INFINITY;
}

// What parts leave behind. One that has its rows to itself writes them to the output; of others,
// each row's weighted sum of values and softmax are kept to be merged.
struct Results {
  const PagedAttentionArgs& args;
  float* sums;  // [rows, value_dim]
  Running* running;

  // Row `row` of a part: of KV head row / (row_end - row_begin), counted from the part's first.
  void put(const Part& part, int64_t row, const float* sum, const Running& state) const {
    if (part.is_alone()) return write_output(args, row_of_output(part, row), sum, state);
    std::copy_n(sum, args.value_dim, sums + (part.results + row) * args.value_dim);
    running[part.results + row] = state;
  }

  int64_t row_of_output(const Part& part, int64_t row) const {
    const int64_t group = args.heads / args.kv_heads, rows = part.row_end - part.row_begin;
    const int64_t folded = part.row_begin + row % rows, kv_head = part.kv_begin + row / rows;
    const int64_t token = args.query_start_loc[part.request] + folded / group;
    return token * args.heads + kv_head * group + folded % group;
  }
};

}  // namespace compiled_attn
