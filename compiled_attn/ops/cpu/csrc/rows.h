// Rows of this step's queries, keys and values, rotated where the step says so.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "elements.h"
#include "scratch.h"

namespace compiled_attn {

// Calls body with a null pointer to the element type of a dtype code.
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

// Rotary position embedding (Su et al., 2021) of a token's row, rounded once to its dtype: bit for
// bit that of torch, which does not fuse the products with the sum.
template <class Element>
CA_NO_CONTRACTION void rotate(const PagedAttentionArgs& args, int64_t token, float* row) {
#if defined(__clang__)
#pragma clang fp contract(off)
#endif
  const int64_t half = args.rotary_dim / 2;
  const float *cos = args.cos + token * half, *sin = args.sin + token * half;
  for (int64_t i = 0; i < half; ++i) {
    float& a = row[args.interleaved ? 2 * i : i];
    float& b = row[args.interleaved ? 2 * i + 1 : i + half];
    const float turned_a = a * cos[i] - b * sin[i], turned_b = a * sin[i] + b * cos[i];
    Element rounded;
    from_float(turned_a, &rounded), a = value_of(rounded);
    from_float(turned_b, &rounded), b = value_of(rounded);
  }
}

// A row of `dim` elements as floats, rotated if `turn`, with zeros behind up to `room`.
inline void read_row(const PagedAttentionArgs& args, const Rows& rows, int64_t token, int64_t head,
                     int64_t dim, bool turn, float* to, int64_t room) {
  by_dtype(args.query_dtype, [&](auto* type) {
    using Element = std::remove_pointer_t<decltype(type)>;
    to_floats(row_at<Element>(rows, token, head), dim, to);
    if (turn && args.cos) rotate<Element>(args, token, to);
  });
  std::fill(to + std::min(padded<kLanes>(dim), room), to + room, 0.0f);
}

// The same as it is kept, for queries of bfloat16.
inline void read_row(const PagedAttentionArgs& args, const Rows& rows, int64_t token, int64_t head,
                     int64_t dim, bool turn, BFloat16* to, int64_t room) {
  std::memcpy(to, row_at<BFloat16>(rows, token, head), dim * sizeof(BFloat16));
  std::memset(to + dim, 0, (room - dim) * sizeof(BFloat16));
  if (!turn || !args.cos) return;
  std::vector<float> row(padded<kLanes>(dim));
  read_row(args, rows, token, head, dim, turn, row.data(), int64_t(row.size()));
  for (int64_t d = 0; d < args.rotary_dim; ++d) from_float(row[d], to + d);
}

}  // namespace compiled_attn
