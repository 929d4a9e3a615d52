// From the results of parts to rows of the output.
#pragma once

#include "part.h"
#include "plan.h"
#include "rows.h"

namespace compiled_attn {

// Writes n sums times a factor as row `at` of the output.
inline void write_out(const PagedAttentionArgs& args, int64_t at, const float* sums, float factor) {
  by_dtype(args.query_dtype, [&](auto* type) {
    auto* out = static_cast<decltype(type)>(args.out) + at * args.value_dim;
    // Nothing seen is zero, whatever 0 times the values came to.
    for (int64_t d = 0; d < args.value_dim; ++d)
      from_float(factor == 0 ? 0.0f : sums[d] * factor, out + d);
  });
}

// Row `row` of the parts of a group becomes row `at` of the output. Sums of the first part are
// overwritten.
inline void merge_row(const PagedAttentionArgs& args, const Part* parts, int64_t count, int64_t row,
                      const Results& results, int64_t at) {
  const float* sinks = args.sinks;
  float maximum = sinks ? sinks[at % args.heads] : -INFINITY;
  for (int64_t i = 0; i < count; ++i)
    maximum = std::max(maximum, results.running[parts[i].results + row].maximum);
  const float origin = maximum == -INFINITY ? 0.0f : maximum;
  float* sums = results.sums + parts[0].results * args.value_dim + row * args.value_dim;
  float total = 0;
  for (int64_t i = 0; i < count; ++i) {
    const Running& state = results.running[parts[i].results + row];
    const float factor = std::exp(state.maximum - origin);
    const float* more = results.sums + (parts[i].results + row) * args.value_dim;
    total += state.total * factor;
    for (int64_t d = 0; d < args.value_dim; ++d)
      sums[d] = i ? sums[d] + more[d] * factor : more[d] * factor;
  }
  if (sinks) total += std::exp(sinks[at % args.heads] - origin);
  args.lse[at] = origin + std::log(total);  // -inf for the empty sum
  write_out(args, at, sums, total == 0 ? 0.0f : 1.0f / total);
}

inline void merge(const PagedAttentionArgs& args, const Plan& plan, const Group& group,
                  const Results& results) {
  const Part& part = plan.parts[group.first];
  const int64_t heads = args.heads / args.kv_heads, rows = part.row_end - part.row_begin;
  const int64_t first = args.query_start_loc[part.request];
  for (int64_t row = 0; row < part.rows(); ++row) {
    const int64_t folded = part.row_begin + row % rows, h = part.kv_begin + row / rows;
    const int64_t token = first + folded / heads, head = h * heads + folded % heads;
    merge_row(args, &part, group.count, row, results, token * args.heads + head);
  }
}

// Tokens of no request.
inline void write_nothing(const PagedAttentionArgs& args, int64_t token) {
  const std::vector<float> zeros(args.value_dim);
  for (int64_t head = 0; head < args.heads; ++head) {
    const int64_t at = token * args.heads + head;
    args.lse[at] = args.sinks ? args.sinks[head] : -INFINITY;
    write_out(args, at, zeros.data(), 0.0f);
  }
}

}  // namespace compiled_attn
