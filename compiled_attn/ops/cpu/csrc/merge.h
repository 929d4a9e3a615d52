// From the results of parts that differ in their keys to rows of the output.
#pragma once

#include "output.h"
#include "plan.h"

namespace compiled_attn {

// The rows of a group, folded into those of its first state, which are overwritten.
inline void merge(const PagedAttentionArgs& args, const Plan& plan, const Group& group,
                  const Results& results) {
  const Part& first = plan.parts[group.first];
  const auto sums = [&](int64_t row) { return results.sums + row * args.value_dim; };
  for (int64_t row = 0; row < first.rows(); ++row) {
    const int64_t all = first.results + row;
    for (int64_t i = 1; i < group.states; ++i) {
      const int64_t more = all + i * first.rows();
      fold(results.running[more], sums(more), args.value_dim, results.running[all], sums(all));
    }
    write_output(args, results.row_of_output(first, row), sums(all), results.running[all]);
  }
}

}  // namespace compiled_attn
