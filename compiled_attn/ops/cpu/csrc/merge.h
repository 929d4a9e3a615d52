// From the results of parts that differ in their keys to rows of the output.
#pragma once

#include "output.h"
#include "plan.h"

namespace compiled_attn {

// Row `row` of the parts of a group. Sums of the first part are overwritten.
inline void merge_row(const PagedAttentionArgs& args, const Part* parts, int64_t count, int64_t row,
                      const Results& results) {
  const auto state = [&](int64_t i) { return results.running[parts[i].results + row]; };
  Running all;
  for (int64_t i = 0; i < count; ++i) all.maximum = std::max(all.maximum, state(i).maximum);
  float* sums = results.sums + (parts[0].results + row) * args.value_dim;
  for (int64_t i = 0; i < count; ++i) {
    const float factor = std::exp(state(i).maximum - all.origin());
    const float* more = results.sums + (parts[i].results + row) * args.value_dim;
    all.total += state(i).total * factor;
    for (int64_t d = 0; d < args.value_dim; ++d)
      sums[d] = i ? sums[d] + more[d] * factor : more[d] * factor;
  }
  write_output(args, results.row_of_output(parts[0], row), sums, all);
}

inline void merge(const PagedAttentionArgs& args, const Plan& plan, const Group& group,
                  const Results& results) {
  const Part& first = plan.parts[group.first];
  for (int64_t row = 0; row < first.rows(); ++row)
    merge_row(args, &first, group.count, row, results);
}

}  // namespace compiled_attn
