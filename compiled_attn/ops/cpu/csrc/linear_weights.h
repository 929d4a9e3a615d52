// Weights of a linear layer that are read next: asked for, and those of int8 made bfloat16.
#pragma once

#include "linear_output.h"

namespace compiled_attn {

// Weights of which some are asked for with each step of a loop, the same line again where that is
// less than a line. The two halves of them come at once: memory gives two streams more than one.
class AskedWeights {
 public:
  AskedWeights() = default;
  AskedWeights(const void* at, int64_t bytes, int64_t steps)
      : at_(static_cast<const int8_t*>(at)),
        half_(bytes / 2),
        step_((half_ + steps - 1) / std::max<int64_t>(steps, 1)) {}

  // To the cache of a level.
  template <int level>
  CA_INLINE void ask() {
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
  // Of a piece that is taken so, where a thread has so many: memory gives eight streams half as much
  // again as one.
  static int64_t panels(int64_t of_thread) { return of_thread < 8 ? 4 : 8; }

  NextWeights() = default;
  // Those of int8 come to `wide`.
  NextWeights(const PackedLinearArgs& layer, BFloat16* wide)
      : at_(static_cast<const int8_t*>(layer.weight)),
        wide_(layer.scale ? wide : nullptr),
        panels_(layer.size_out / kPanel),
        panel_(kPanel * layer.size_in * weight_bytes(layer)),
        left_(panel_ / kLine) {}

  // All panels at once, a line of each in turn.
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
  // What takes the place of all these where nothing is to be widened; `now`: weights that are there.
  AskedWeights asked(int64_t steps, const void* now) const {
    if (wide_ || !at_) return {now, 0, steps};
    return {at_, panels_ * panel_, steps};
  }
  void take_all() { take(left_ * panels_); }
  // What must be there before the weights are read.
  void take_rest() {
    if (wide_) take_all();
  }

 private:
  static constexpr int64_t kLine = 64;     // bytes
  static constexpr int64_t kAhead = 1024;  // behind the last panel lies the next piece's first

  CA_BESIDE_SUMS void widen_panels() {
    const int64_t ahead = kAhead + (left_ * kLine > kAhead ? 0 : (panels_ - 1) * panel_);
    for (int64_t p = 0; p < panels_; ++p) {
      __builtin_prefetch(at_ + p * panel_ + ahead, 0, 2);
      for (int64_t i = 0; i < kLine; i += kLanes)
        widen(at_ + p * panel_ + i, wide_ + p * panel_ + i);
    }
    wide_ += kLine;
  }

  // bfloat16 holds int8 exactly.
  static CA_INLINE void widen(const int8_t* from, BFloat16* to) { store(to, load(from)); }

  const int8_t* at_ = nullptr;
  BFloat16* wide_ = nullptr;
  int64_t panels_ = 0, panel_ = 0;  // and the bytes of one
  int64_t left_ = 0;                // lines of each panel
};

}  // namespace compiled_attn
