// Rows of this step's queries, keys and values.
#pragma once

#include <algorithm>
#include <type_traits>

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

// A row of `dim` elements as floats, with zeros behind up to `room`.
inline void read_row(const PagedAttentionArgs& args, const Rows& rows, int64_t token, int64_t head,
                     int64_t dim, float* to, int64_t room) {
  by_dtype(args.query_dtype, [&](auto* type) {
    using Element = std::remove_pointer_t<decltype(type)>;
    to_floats(row_at<Element>(rows, token, head), dim, to);
  });
  std::fill(to + std::min(padded<kLanes>(dim), room), to + room, 0.0f);
}

// The same as it is kept, for queries of bfloat16.
inline void read_row(const PagedAttentionArgs&, const Rows& rows, int64_t token, int64_t head,
                     int64_t dim, BFloat16* to, int64_t room) {
  std::memcpy(to, row_at<BFloat16>(rows, token, head), dim * sizeof(BFloat16));
  std::memset(to + dim, 0, (room - dim) * sizeof(BFloat16));
}

}  // namespace compiled_attn
