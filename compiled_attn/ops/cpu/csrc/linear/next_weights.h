// Prefetches the next weights of a linear layer.
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
  explicit NextWeights(const PackedLinearArgs& layer)
      : at_(static_cast<const int8_t*>(layer.weight)),
        panels_(layer.size_out / kPanel),
        panel_(kPanel * layer.size_in * weight_bytes(layer)),
        left_(panel_ / kLine) {}

  // Advances all panels together, a line of each.
  CA_INLINE void take(int64_t lines) {
    for (; lines > 0 && left_ > 0; lines -= panels_, --left_, at_ += kLine)
      for (int64_t p = 0; p < panels_; ++p) __builtin_prefetch(at_ + p * panel_, 0, 2);
  }
  void take_all() { take(left_ * panels_); }
  // now: readable weights, prefetched if there are no next ones
  WeightPrefetcher prefetcher(int64_t steps, const void* now) const {
    if (!at_) return {now, 0, steps};
    return {at_, panels_ * panel_, steps};
  }

 private:
  static constexpr int64_t kLine = 64;  // bytes

  const int8_t* at_ = nullptr;
  int64_t panels_ = 0, panel_ = 0;  // panel_: bytes
  int64_t left_ = 0;  // lines of each panel
};

}  // namespace compiled_attn
