// New keys and values into their slots of the caches.
#pragma once

#include "rows.h"

namespace compiled_attn {

template <class Element>
CA_INLINE void write_row(const float* row, int64_t dim, Element* to, float* scale) {
  if constexpr (is_quantised<Element>) {
    // The largest element becomes the largest code; a tiny row keeps a scale that is no subnormal.
    float most = 0x1p-110f;
    bool is_nan = false;
    for (int64_t d = 0; d < dim; ++d) {
      const float size = std::fabs(row[d]);
      most = size > most ? size : most;
      is_nan |= size != size;
    }
    const float limit = largest_code(to);
    *scale = is_nan ? NAN : most / limit;
    for (int64_t d = 0; d < dim; ++d) {
      const float code = row[d] / *scale;
      from_float(code > limit ? limit : code < -limit ? -limit : code, to + d);
    }
  } else {
    for (int64_t d = 0; d < dim; ++d) from_float(row[d], to + d);
  }
}

// Writes the rows of one token, all heads, to its slot.
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

}  // namespace compiled_attn
