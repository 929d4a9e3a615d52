// Floats as integers of 16 bits and a unit, so that their products with codes of 8 bits are
// integers.
//
// Elements down to 1/128 of the largest are rounded no more than by bfloat16.
#pragma once

#include <algorithm>
#include <cmath>

#include "simd.h"

#if defined(__AVX2__)

namespace compiled_attn {

constexpr int kMostCode = 128;  // the size of the lowest code

// How floats become integers, and integers floats: i * unit. A float that is not finite makes the
// unit NaN, and its integer is any.
struct Fixed {
  float largest, factor, unit;

  // Of the n floats at `from`: sums of their products with n codes fit into 32 bits.
  Fixed(const float* from, int64_t n)
      : largest(std::min(127 * 256.0f, 2.13e9f / float(kMostCode * n))) {
    Ints most{};  // bits of sizes are in the order of sizes, with NaN above
    for (int64_t i = 0; i < n; i += kLanes)
      most = larger_of(most, bits_as<Ints>(load(from + i)) & all(INT32_MAX));
    const float peak = bits_as<float>(largest_of(most));
    factor = peak > 0 ? std::min(largest / peak, 1e38f) : 0;
    unit = peak > 0 ? 1 / factor : peak;
    if (!(peak < INFINITY)) factor = 0, unit = NAN;
  }

  CA_INLINE Ints integers(const float* from) const {
    return rounded(larger(load(from) * all(factor), all(-largest)));
  }
};

}  // namespace compiled_attn

#endif
