// Query rows side by side in vectors: products with them, what they see, and their softmax.
#pragma once

#include "scores.h"
#include "units.h"

namespace compiled_attn {

// kRowsOfBlock x kPanel sums, in registers.
struct SumBlock {
  Floats of[kRowsOfBlock][kWidthOfBlock];

  // at(r, w) gives where they begin.
  template <class At>
  CA_INLINE void begin(const At& at) {
#pragma GCC unroll 8
    for (int r = 0; r < kRowsOfBlock; ++r)
#pragma GCC unroll 8
      for (int w = 0; w < kWidthOfBlock; ++w) of[r][w] = at(r, w);
  }

  // Adds left [kRowsOfBlock, units] x panel [units, kPanel]; left(r, u) gives the address of a unit.
  template <class Units, class Left>
  CA_INLINE void add_products(const Left& left, const float* panel, int64_t units) {
    for (int64_t u = 0; u < units; ++u, panel += kPanel) {
      Floats b[kWidthOfBlock];
#pragma GCC unroll 8
      for (int w = 0; w < kWidthOfBlock; ++w) b[w] = load(panel + w * kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < kRowsOfBlock; ++r) {
        const float a = load_as<float>(left(r, u));
#pragma GCC unroll 8
        for (int w = 0; w < kWidthOfBlock; ++w) of[r][w] = Units::step(of[r][w], a, b[w]);
      }
    }
  }

  // The largest of each column.
  CA_INLINE void raise(Floats (&most)[kWidthOfBlock]) const {
#pragma GCC unroll 8
    for (int r = 0; r < kRowsOfBlock; ++r)
#pragma GCC unroll 8
      for (int w = 0; w < kWidthOfBlock; ++w) most[w] = larger(of[r][w], most[w]);
  }

  CA_INLINE void put(float* out) const {
#pragma GCC unroll 8
    for (int r = 0; r < kRowsOfBlock; ++r)
#pragma GCC unroll 8
      for (int w = 0; w < kWidthOfBlock; ++w) store(out + r * kPanel + w * kLanes, of[r][w]);
  }
};

// What the query rows of a panel see, and their softmax (Milakov and Gimelshein, 2018), of which the
// maxima count powers of two.
struct PanelRows {
  alignas(64) float slope[kPanel];     // ALiBi, 0: none
  alignas(64) int32_t position[kPanel];
  alignas(64) int32_t begin[kPanel], end[kPanel];  // of the keys that each sees
  alignas(64) float maximum[kPanel], total[kPanel];

  void put(int64_t i, float slope_of_row, int64_t position_of_row, Span seen) {
    slope[i] = slope_of_row, position[i] = int32_t(position_of_row);
    begin[i] = int32_t(seen.begin), end[i] = int32_t(seen.end);
    maximum[i] = -INFINITY, total[i] = 0;
  }
  // Keys that some of the rows see, and those that all of them do: the last ones see furthest.
  Span some() const { return {begin[0], end[kPanel - 1]}; }
  Span all() const { return {begin[kPanel - 1], end[0]}; }
  Running running(int64_t i) const { return {maximum[i] * kLog2, total[i]}; }
};

}  // namespace compiled_attn
