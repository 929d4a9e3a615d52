// Operands of the SIMD prefill kernel: units of 32 bits along the reduced axis, either a float or a
// pair of bfloat16.
#pragma once

#include "attention/rows.h"
#include "attention/scores.h"
#include "vector/bfloat16.h"

namespace compiled_attn {

constexpr int kBlockRows = kRegisters == 32 ? 8 : 4;  // keys, or dims, of the innermost product
constexpr int kBlockVectors = 3;  // vectors of query rows
constexpr int kPanel = kBlockVectors * kLanes;

// A unit is a float, converted from any cache dtype.
template <class Element_>
struct Float32Units {
  using Element = Element_;
  static constexpr int kUnit = 1;  // elements

  CA_INLINE static Floats step(Floats sum, float a, Floats b) { return sum + splat(a) * b; }
  // A query as whole vectors of units; null where it must be copied.
  static const float* query(const PagedAttentionArgs& args, int64_t token, int64_t head) {
    if (args.query_dtype != kFloat32 || args.head_dim % kLanes) return nullptr;
    return row_at<float>(args.query, token, head);
  }
  static void copy_query(const PagedAttentionArgs& args, int64_t token, int64_t head, float* to,
                    int64_t n) {
    read_row(args, args.query, token, head, args.head_dim, to, n);
  }
  // A key as zero-padded units; null where it must be copied.
  static const float* key(const Element* row, int64_t) {
    return std::is_same_v<Element, float> ? reinterpret_cast<const float*>(row) : nullptr;
  }
  static void copy_key(const Element* row, int64_t dim, float* to) { to_floats(row, dim, to); }
  // The values of kUnit tokens; null where they must be copied.
  static const float* value(const Element* const* rows, int64_t dim) {
    return dim % kBlockRows ? nullptr : key(rows[0], dim);
  }
  static void copy_value(const Element* const* rows, int64_t dim, float* to) {
    to_floats(rows[0], dim, to);
    const int64_t whole = padded<kBlockRows>(dim);
    std::fill(to + std::min(padded<kLanes>(dim), whole), to + whole, 0.0f);
  }
  CA_INLINE static Floats pack_weights(const Floats* weights) { return weights[0]; }
};

#if CA_HAS_BF16_DOT
// A unit is two elements of a key, or of values of two tokens. Passed as floats.
struct Bf16Units {
  using Element = BFloat16;
  static constexpr int kUnit = 2;

  CA_INLINE static Floats step(Floats sum, float a, Floats b) {
    return dot_bf16(sum, bit_cast<BFloat16x2>(splat(a)), bit_cast<BFloat16x2>(b));
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
    return bit_cast<Floats>(widen(load_as<U16s>(a)) | widen(load_as<U16s>(b)) << 16);
  }
  CA_INLINE static Floats pack_weights(const Floats* weights) {
    return bit_cast<Floats>(round_to_pairs(weights[0], weights[kBlockVectors]));
  }
};
#endif

// kBlockRows x kPanel sums in registers.
struct SumBlock {
  Floats of[kBlockRows][kBlockVectors];

  // init(r, w) returns the initial vectors.
  template <class At>
  CA_INLINE void begin(const At& at) {
#pragma GCC unroll 8
    for (int r = 0; r < kBlockRows; ++r)
#pragma GCC unroll 8
      for (int w = 0; w < kBlockVectors; ++w) of[r][w] = at(r, w);
  }

  // Adds left [kBlockRows, units] x panel [units, kPanel]; left(r, u) returns the address of a
  // unit.
  template <class Units, class Left>
  CA_INLINE void multiply_add(const Left& left, const float* panel, int64_t units) {
    for (int64_t u = 0; u < units; ++u, panel += kPanel) {
      Floats b[kBlockVectors];
#pragma GCC unroll 8
      for (int w = 0; w < kBlockVectors; ++w) b[w] = load(panel + w * kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < kBlockRows; ++r) {
        const float a = load_as<float>(left(r, u));
#pragma GCC unroll 8
        for (int w = 0; w < kBlockVectors; ++w) of[r][w] = Units::step(of[r][w], a, b[w]);
      }
    }
  }

  // Updates the maximum of each column.
  CA_INLINE void update_max(Floats (&most)[kBlockVectors]) const {
#pragma GCC unroll 8
    for (int r = 0; r < kBlockRows; ++r)
#pragma GCC unroll 8
      for (int w = 0; w < kBlockVectors; ++w) most[w] = max(of[r][w], most[w]);
  }

  CA_INLINE void put(float* out) const {
#pragma GCC unroll 8
    for (int r = 0; r < kBlockRows; ++r)
#pragma GCC unroll 8
      for (int w = 0; w < kBlockVectors; ++w) store(out + r * kPanel + w * kLanes, of[r][w]);
  }
};

// What the query rows of a panel see, and their running softmax in log2 (Milakov and Gimelshein,
// 2018).
struct PanelState {
  alignas(64) float slope[kPanel];     // ALiBi, 0: none
  alignas(64) int32_t position[kPanel];
  alignas(64) int32_t begin[kPanel], end[kPanel];  // keys that each row sees
  alignas(64) float maximum[kPanel], total[kPanel];

  void put(int64_t i, float slope_of_row, int64_t position_of_row, Span seen) {
    slope[i] = slope_of_row, position[i] = int32_t(position_of_row);
    begin[i] = int32_t(seen.begin), end[i] = int32_t(seen.end);
    maximum[i] = -INFINITY, total[i] = 0;
  }
  // Keys that any, or all, rows see; rows are ordered by position.
  Span any_visible() const { return {begin[0], end[kPanel - 1]}; }
  Span all_visible() const { return {begin[kPanel - 1], end[0]}; }
  SoftmaxState softmax(int64_t i) const { return {maximum[i] * kLog2, total[i]}; }
};

}  // namespace compiled_attn
