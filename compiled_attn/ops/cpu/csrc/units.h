// What many query rows are multiplied in: units of 32 bits along the axis that is summed over, a float
// or a pair of bfloat16.
#pragma once

#include "pairs.h"
#include "rows.h"

namespace compiled_attn {

constexpr int kRowsOfBlock = kRegisters == 32 ? 8 : 4;  // keys, or dims, of the innermost product
constexpr int kWidthOfBlock = 3;                        // and its vectors of query rows
constexpr int kPanel = kWidthOfBlock * kLanes;

// A unit is a float, whatever the cache holds. Units of both kinds are passed as floats.
template <class Element_>
struct FloatUnits {
  using Element = Element_;
  static constexpr int kUnit = 1;  // elements

  CA_INLINE static Floats step(Floats sum, float a, Floats b) { return sum + all(a) * b; }
  // A query as whole vectors of units; null where it is to be copied.
  static const float* query(const PagedAttentionArgs& args, int64_t token, int64_t head) {
    if (args.query_dtype != kFloat32 || args.head_dim % kLanes) return nullptr;
    return row_at<float>(args.query, token, head);
  }
  static void copy_query(const PagedAttentionArgs& args, int64_t token, int64_t head, float* to,
                    int64_t n) {
    read_row(args, args.query, token, head, args.head_dim, to, n);
  }
  // A key of so many elements as units, with zeros behind; null where it is to be copied.
  static const float* key(const Element* row, int64_t) {
    return std::is_same_v<Element, float> ? reinterpret_cast<const float*>(row) : nullptr;
  }
  static void copy_key(const Element* row, int64_t dim, float* to) { to_floats(row, dim, to); }
  // The same of the values of kUnit tokens.
  static const float* value(const Element* const* rows, int64_t dim) {
    return dim % kRowsOfBlock ? nullptr : key(rows[0], dim);
  }
  static void copy_value(const Element* const* rows, int64_t dim, float* to) {
    to_floats(rows[0], dim, to);
    const int64_t whole = padded<kRowsOfBlock>(dim);
    std::fill(to + std::min(padded<kLanes>(dim), whole), to + whole, 0.0f);
  }
  CA_INLINE static Floats joined(const Floats* weights) { return weights[0]; }
};

#if CA_HAS_BFLOAT16_DOT
// A unit is two elements of a key, or of values of two tokens.
struct PairUnits {
  using Element = BFloat16;
  static constexpr int kUnit = 2;

  CA_INLINE static Floats step(Floats sum, float a, Floats b) {
    return add_products(sum, bits_as<Pairs>(all(a)), bits_as<Pairs>(b));
  }
  static const float* query(const PagedAttentionArgs& args, int64_t token, int64_t head) {
    if (args.head_dim % (kUnit * kLanes)) return nullptr;
    return reinterpret_cast<const float*>(row_at<BFloat16>(args.query, token, head));
  }
  static void copy_query(const PagedAttentionArgs& args, int64_t token, int64_t head, float* to,
                    int64_t n) {
    read_row(args, args.query, token, head, args.head_dim, reinterpret_cast<BFloat16*>(to),
             2 * n);
  }
  static const float* key(const BFloat16* row, int64_t dim) {
    return dim % kUnit ? nullptr : reinterpret_cast<const float*>(row);
  }
  static void copy_key(const BFloat16* row, int64_t dim, float* to) {
    to[dim / kUnit] = 0;
    std::memcpy(to, row, dim * sizeof(BFloat16));
  }
  static const float* value(const BFloat16* const*, int64_t) { return nullptr; }
  static void copy_value(const BFloat16* const* rows, int64_t dim, float* to) {
    int64_t d = 0;
    for (; d + kLanes <= dim; d += kLanes) store(to + d, zipped(rows[0] + d, rows[1] + d));
    if (d == dim) return;
    BFloat16 rest[kUnit][kLanes] = {};
    for (int i = 0; i < kUnit; ++i) std::memcpy(rest[i], rows[i] + d, (dim - d) * sizeof(BFloat16));
    store(to + d, zipped(rest[0], rest[1]));
  }
  CA_INLINE static Floats zipped(const BFloat16* a, const BFloat16* b) {
    return bits_as<Floats>(widened(load_as<Words>(a)) | widened(load_as<Words>(b)) << 16);
  }
  CA_INLINE static Floats joined(const Floats* weights) {
    return bits_as<Floats>(joined_pairs(weights[0], weights[kWidthOfBlock]));
  }
};
#endif

}  // namespace compiled_attn
