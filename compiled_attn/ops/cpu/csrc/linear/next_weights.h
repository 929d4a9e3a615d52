// Prefetches the next weights of a linear layer, and widens int8 weights to bfloat16.
#pragma once

#include "linear/epilogue.h"

namespace compiled_attn {

// Prefetches part of some weights in each step of a loop. Two streams at once: memory serves two
// faster than one.
class WeightPrefetcher {
 public:
  WeightPrefetcher() = default;
  WeightPrefetcher(const void* at, int64_t bytes, int64_t steps)
      : at_(static_cast<const int8_t*>(at)),
        half_(bytes / 2),
        step_((half_ + steps - 1) / std::max<int64_t>(steps, 1)) {}

  // level: the cache to prefetch to
  template <int level>
  CA_INLINE void prefetch() {
    __builtin_prefetch(at_, 0, 4 - level);
    __builtin_prefetch(at_ + half_, 0, 4 - level);
    at_ += step_;
  }

 private:
  const int8_t* at_ = nullptr;
  int64_t half_ = 0, step_ = 0;
};

class NextWeights {
 public:
  // Panels per piece, given those of a thread: eight streams reach 1.5 times the bandwidth of one.
  static int64_t panels(int64_t of_thread) { return of_thread < 8 ? 4 : 8; }

  NextWeights() = default;
  // wide: where int8 weights are widened to
  NextWeights(const PackedLinearArgs& layer, BFloat16* wide)
      : at_(static_cast<const int8_t*>(layer.weight)),
        wide_(layer.scale ? wide : nullptr),
        panels_(layer.size_out / kPanel),
        panel_(kPanel * layer.size_in * weight_bytes(layer)),
        left_(panel_ / kLine) {}

  // Advances all panels together, a line of each.
  CA_INLINE void take(int64_t lines) {
    for (; lines > 0 && left_ > 0; lines -= panels_, --left_, at_ += kLine) {
      if (wide_)
        widen_panels();
      else
        for (int64_t p = 0; p < panels_; ++p) __builtin_prefetch(at_ + p * panel_, 0, 2);
    }
  }
  CA_INLINE void widen_line() {
    if (wide_) take(panels_);
  }
  // Prefetcher for weights that need no widening; `now`: readable weights, prefetched otherwise.
  WeightPrefetcher prefetcher(int64_t steps, const void* now) const {
    if (wide_ || !at_) return {now, 0, steps};
    return {at_, panels_ * panel_, steps};
  }
  void take_all() { take(left_ * panels_); }
  // Must be called before the weights are read.
  void take_rest() {
    if (wide_) take_all();
  }

 private:
  static constexpr int64_t kLine = 64;     // bytes
  static constexpr int64_t kAhead = 1024;  // the first panel of the next piece follows the last one

  CA_INLINE_IF_REGISTERS void widen_panels() {
    const int64_t ahead = kAhead + (left_ * kLine > kAhead ? 0 : (panels_ - 1) * panel_);
    for (int64_t p = 0; p < panels_; ++p) {
      __builtin_prefetch(at_ + p * panel_ + ahead, 0, 2);
      for (int64_t i = 0; i < kLine; i += kLanes)
        widen(at_ + p * panel_ + i, wide_ + p * panel_ + i);
    }
    wide_ += kLine;
  }

  // bfloat16 represents int8 exactly.
  static CA_INLINE void widen(const int8_t* from, BFloat16* to) { store(to, load(from)); }

  const int8_t* at_ = nullptr;
  BFloat16* wide_ = nullptr;
  int64_t panels_ = 0, panel_ = 0;  // panel_: bytes
  int64_t left_ = 0;  // lines of each panel
};

}  // namespace compiled_attn
