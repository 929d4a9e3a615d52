// Weights of a linear layer that are read next: asked for, and those of int8 made bfloat16.
//
// All panels are taken at once, a line of each in turn: memory gives eight streams half as much
// again as one.
#pragma once

#include "linear_output.h"

namespace compiled_attn {

class NextWeights {
 public:
  static constexpr int64_t kLine = 64;  // bytes

  NextWeights() = default;
  // Those of int8 come to `wide`. products: vectors that a line is multiplied with.
  NextWeights(const PackedLinearArgs& layer, BFloat16* wide, int64_t products)
      : at_(static_cast<const int8_t*>(layer.weight)),
        wide_(layer.scale ? wide : nullptr),
        is_near_(layer.asks_near && products >= kManyProducts),
        panels_(layer.size_out / kPanel),
        panel_(kPanel * layer.size_in * weight_bytes(layer)),
        left_(panel_ / kLine) {}

  CA_INLINE void take(int64_t lines) {
    for (; lines > 0 && left_ > 0; lines -= panels_, --left_, at_ += kLine) {
      if (wide_)
        widen_panels();
      else if (is_near_)
        for (int64_t p = 0; p < panels_; ++p) __builtin_prefetch(at_ + p * panel_, 0, 3);
      else
        for (int64_t p = 0; p < panels_; ++p) __builtin_prefetch(at_ + p * panel_, 0, 2);
    }
  }
  CA_INLINE void take_line() { take(panels_); }
  void take_all() { take(left_ * panels_); }
  // What must be there before the weights are read.
  void take_rest() {
    if (wide_) take_all();
  }

 private:
  // Of a line, so that the next is there before it is done: what is on its way to the first level
  // cache holds a place in the queue of its misses. On a Zen 4 eight are too few.
  static constexpr int64_t kManyProducts = 16;
  static constexpr int64_t kAhead = 1024;  // behind the last panel lies the next piece's first

  CA_INLINE void widen_panels() {
    const int64_t ahead = kAhead + (left_ * kLine > kAhead ? 0 : (panels_ - 1) * panel_);
    for (int64_t p = 0; p < panels_; ++p) {
      __builtin_prefetch(at_ + p * panel_ + ahead, 0, 2);
      for (int64_t i = 0; i < kLine; i += kLanes)
        widen(at_ + p * panel_ + i, wide_ + p * panel_ + i);
    }
    wide_ += kLine;
  }

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
  bool is_near_ = false;  // comes to the first level cache, else the second
  int64_t panels_ = 0, panel_ = 0;  // and the bytes of one
  int64_t left_ = 0;                // lines of each panel
};

}  // namespace compiled_attn
