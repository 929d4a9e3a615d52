// From sums of a linear layer to rows of its output.
#pragma once

#include "bfloat16_dot.h"

namespace compiled_attn {

constexpr int kPanel = 16;  // outputs whose weights lie together

// What sums of outputs are multiplied with and what is added, each or null.
struct Finish {
  const float* scale;
  const BFloat16* bias;

  CA_INLINE Finish from(int64_t column) const {
    return {scale ? scale + column : nullptr, bias ? bias + column : nullptr};
  }
};

CA_INLINE Finish finish_of(const PackedLinearArgs& layer) {
  return {layer.scale, static_cast<const BFloat16*>(layer.bias)};
}

// kLanes sums, finished.
CA_INLINE Floats finished(const float* sums, Finish finish, int64_t column) {
  Floats whole = load(sums);
  if (finish.scale) whole *= load(finish.scale + column);
  if (finish.bias) whole += load(finish.bias + column);
  return whole;
}

// kPanel sums, finished, rounded.
CA_INLINE void round_panel(const float* sums, Finish finish, BFloat16* out) {
  for (int i = 0; i < kPanel; i += kLanes) {
    const Floats whole = finished(sums + i, finish, i);
#if CA_HAS_BFLOAT16_DOT
    store(out + i, whole);
#else
    for (int lane = 0; lane < kLanes; ++lane) from_float(whole[lane], out + i + lane);
#endif
  }
}

// The same of two panels side by side, a line of memory.
CA_INLINE void round_panels(const float* first, const float* second, Finish finish,
                            BFloat16* out) {
#if CA_HAS_BFLOAT16_DOT
  store(out, finished(first, finish, 0), finished(second, finish, kPanel));
#else
  round_panel(first, finish, out);
  round_panel(second, finish.from(kPanel), out + kPanel);
#endif
}

}  // namespace compiled_attn
