// From sums of a linear layer to rows of its output.
#pragma once

#include "bfloat16_dot.h"

namespace compiled_attn {

constexpr int kPanel = 16;  // outputs whose weights lie together

template <class Args>
CA_INLINE const BFloat16* bias_of(const Args& args, int64_t column) {
  return args.bias ? static_cast<const BFloat16*>(args.bias) + column : nullptr;
}

// kPanel sums, with the bias, rounded.
CA_INLINE void round_panel(const float* sums, const BFloat16* bias, BFloat16* out) {
  for (int i = 0; i < kPanel; i += kLanes) {
    const Floats whole = bias ? load(sums + i) + load(bias + i) : load(sums + i);
#if CA_HAS_BFLOAT16_DOT
    store(out + i, whole);
#else
    for (int lane = 0; lane < kLanes; ++lane) from_float(whole[lane], out + i + lane);
#endif
  }
}

}  // namespace compiled_attn
