// Weights of a linear layer that are read next: asked for, and those of int8 made bfloat16.
//
// All panels are asked for at once, each a stream of its own: memory gives eight streams half as
// much again as one.
//
// All panels are asked for at once, each a stream of its own: memory gives eight streams half as
// much again as one.
#pragma once

#include "linear_output.h"

namespace compiled_attn {

class NextWeights {
 public:
  static constexpr int64_t kLine = 64;  // bytes

  NextWeights() = default;
  // Those of int8 come to `wide`.
  NextWeights(const PackedLinearArgs& layer, BFloat16* wide)
      : at_(static_cast<const int8_t*>(layer.weight)),
        wide_(layer.scale ? wide : nullptr),
        lines_(layer.size_out * layer.size_in / kLine * (wide_ ? 1 : sizeof(BFloat16))),
        panels_(layer.size_out / kPanel),
        panel_(kPanel * layer.size_in * sizeof(BFloat16)) {}

  CA_INLINE void take(int64_t lines) {
    lines = std::min(lines, lines_);
    lines_ -= lines;
    if (!wide_) {
      for (; lines > 0; lines -= panels_, at_ += kLine)
        for (int64_t p = 0; p < panels_; ++p) __builtin_prefetch(at_ + p * panel_, 0, 2);
      return;
    }
    for (; lines > 0; --lines, at_ += kLine) {
      __builtin_prefetch(at_ + kAhead, 0, 2);
      for (int64_t i = 0; i < kLine; i += kLanes) widen(at_ + i, wide_ + i);
      wide_ += kLine;
    }
  }
  void take_all() { take(lines_); }
  // What must be there before the weights are read.
  void take_rest() {
    if (wide_) take_all();
  }

 private:
  static constexpr int64_t kAhead = 4096;

  // bfloat16 holds int8 exactly.
  static CA_INLINE void widen(const int8_t* from, BFloat16* to) {
#if CA_HAS_BFLOAT16_DOT
    store(to, load(from));
#else
    const Floats values = load(from);
    for (int lane = 0; lane < kLanes; ++lane) from_float(values[lane], to + lane);
#endif
  }

  const int8_t* at_ = nullptr;
  BFloat16* wide_ = nullptr;
  int64_t lines_ = 0;                // to go
  int64_t panels_ = 0, panel_ = 0;  // and their bytes
};

}  // namespace compiled_attn
