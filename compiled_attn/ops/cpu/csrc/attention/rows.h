// Reads rows of queries, and writes rows of the caches and of the output.
#pragma once

#include <algorithm>
#include <type_traits>

#include "attention/scores.h"
#include "scratch.h"
#include "vector/elements.h"

namespace compiled_attn {

// Calls body with a null pointer to the element type of a dtype.
template <class Body>
auto by_dtype(int32_t dtype, const Body& body) {
  switch (dtype) {
    case kBFloat16:
      return body(static_cast<BFloat16*>(nullptr));
    case kFloat16:
      return body(static_cast<Float16*>(nullptr));
    case kInt8:
      return body(static_cast<int8_t*>(nullptr));
    case kFloat8E4M3:
      return body(static_cast<Float8E4M3*>(nullptr));
    case kFloat8E5M2:
      return body(static_cast<Float8E5M2*>(nullptr));
    default:
      return body(static_cast<float*>(nullptr));
  }
}

template <class Element>
const Element* row_at(const Rows& rows, int64_t token, int64_t head) {
  return static_cast<const Element*>(rows.data) + token * rows.token + head * rows.head;
}

// Reads a row of `dim` elements as floats, zero-padded to `room`.
inline void read_row(const PagedAttentionArgs& args, const Rows& rows, int64_t token, int64_t head,
                     int64_t dim, float* to, int64_t room) {
  by_dtype(args.query_dtype, [&](auto* type) {
    using Element = std::remove_pointer_t<decltype(type)>;
    to_floats(row_at<Element>(rows, token, head), dim, to);
  });
  std::fill(to + std::min(padded<kLanes>(dim), room), to + room, 0.0f);
}

// Reads a bfloat16 row unchanged, zero-padded to `room`.
inline void read_row(const PagedAttentionArgs&, const Rows& rows, int64_t token, int64_t head,
                     int64_t dim, BFloat16* to, int64_t room) {
  std::memcpy(to, row_at<BFloat16>(rows, token, head), dim * sizeof(BFloat16));
  std::memset(to + dim, 0, (room - dim) * sizeof(BFloat16));
}

template <class Element>
CA_INLINE void write_row(const float* row, int64_t dim, Element* to, float* scale) {
  if constexpr (is_quantised<Element>) {
    // The largest element maps to the largest code; tiny rows keep a normal scale.
    float most = 0x1p-110f;
    bool is_nan = false;
    for (int64_t d = 0; d < dim; ++d) {
      const float size = std::fabs(row[d]);
      most = size > most ? size : most;
      is_nan |= size != size;
    }
    const float limit = max_code(to);
    *scale = is_nan ? NAN : most / limit;
    for (int64_t d = 0; d < dim; ++d) {
      const float code = row[d] / *scale;
      from_float(code > limit ? limit : code < -limit ? -limit : code, to + d);
    }
  } else {
    for (int64_t d = 0; d < dim; ++d) from_float(row[d], to + d);
  }
}

// Writes all heads of one token to its slot.
template <class Element>
void write_token(const PagedAttentionArgs& args, int64_t token, const Rows& rows, int64_t dim,
                 const Pages& pages, const Pages& scales, float* row) {
  const int64_t slot = args.slot_mapping[token];
  const int64_t block = slot / args.block_size, within = slot % args.block_size;
  for (int64_t h = 0; h < args.kv_heads; ++h) {
    Element* to = static_cast<Element*>(pages.data) + block * pages.block + within * pages.slot +
                  h * pages.head;
    const bool is_same = !is_quantised<Element> && args.cache_dtype == args.query_dtype;
    if (is_same) {
      std::memcpy(to, row_at<Element>(rows, token, h), dim * sizeof(Element));
      continue;
    }
    read_row(args, rows, token, h, dim, row, padded<kLanes>(dim));
    float* scale = static_cast<float*>(scales.data);
    write_row(
        row, dim, to,
        scale ? scale + block * scales.block + within * scales.slot + h * scales.head : nullptr);
  }
}

// Normalizes a row of weighted sums and adds the sink; `at` indexes [tokens * heads].
inline void write_output(const PagedAttentionArgs& args, int64_t at, const float* sums,
                         const SoftmaxState& state) {
  const float sink = args.sinks ? args.sinks[at % args.heads] : -INFINITY;
  const float maximum = std::max(state.maximum, sink);
  const float origin = maximum == -INFINITY ? 0.0f : maximum;
  const float factor = state.maximum == origin ? 1.0f : std::exp(state.maximum - origin);
  const float total = state.total * factor + (args.sinks ? std::exp(sink - origin) : 0.0f);
  args.lse[at] = origin + std::log(total);  // -inf where nothing was seen
  const float weight = total == 0 ? 0.0f : factor / total;
  by_dtype(args.query_dtype, [&](auto* type) {
    auto* out = static_cast<decltype(type)>(args.out) + at * args.value_dim;
    if (weight == 0)  // a row that sees nothing is zero, even if its sums are not finite
      return std::fill_n(out, args.value_dim, std::remove_pointer_t<decltype(type)>{}), void();
    // A sum of -0 became 0 if masked keys were added: adds a 0 to all.
    for (int64_t d = 0; d < args.value_dim; ++d) from_float(sums[d] * weight + 0.0f, out + d);
  });
}

// Tokens of no request: zero, with or without sinks.
inline void write_nothing(const PagedAttentionArgs& args, int64_t token) {
  by_dtype(args.query_dtype, [&](auto* type) {
    const int64_t row = args.heads * args.value_dim;
    std::fill_n(static_cast<decltype(type)>(args.out) + token * row, row,
                std::remove_pointer_t<decltype(type)>{});
  });
  for (int64_t head = 0; head < args.heads; ++head)
    args.lse[token * args.heads + head] = args.sinks ? args.sinks[head] : -INFINITY;
}

// Where parts put their rows: in the output if a part covers all keys, else in buffers to be
// merged.
struct Results {
  const PagedAttentionArgs& args;
  float* sums;  // [rows, value_dim]
  SoftmaxState* states;

  // row: counted over the part's KV heads, row_end - row_begin rows each
  void put(const Part& part, int64_t row, const float* sum, const SoftmaxState& state) const {
    if (part.covers_all_keys()) return write_output(args, row_of_output(part, row), sum, state);
    std::copy_n(sum, args.value_dim, sums + (part.results + row) * args.value_dim);
    states[part.results + row] = state;
  }

  int64_t row_of_output(const Part& part, int64_t row) const {
    const int64_t group = args.heads / args.kv_heads, rows = part.row_end - part.row_begin;
    const int64_t folded = part.row_begin + row % rows, kv_head = part.kv_begin + row / rows;
    const int64_t token = args.query_start_loc[part.request] + folded / group;
    return token * args.heads + kv_head * group + folded % group;
  }
};

}  // namespace compiled_attn
