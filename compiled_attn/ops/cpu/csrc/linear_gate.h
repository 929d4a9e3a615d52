// Outputs of one linear layer as the gate of another's (Shazeer, 2020): silu of the first times the
// second, piece by piece, while both are in the caches.
#pragma once

#include "linear_output.h"
#include "scratch.h"

namespace compiled_attn {

// x / (1 + e^-x): NaN at -inf, as torch's is, and -0 below -87, where torch's is 1e-36 at the most.
CA_INLINE Floats silu(Floats x) {
  const Ints is_negative = x < Floats{};
  const Floats e = exponential(either(is_negative, x, -x));
  return x * (either(is_negative, e, all(1.0f)) / (all(1.0f) + e));
}

// A piece of the second layer's outputs beside those of the first, a place for each thread.
template <class Element>
class Gated {
 public:
  // Of a piece, at most.
  Gated(int64_t rows, int64_t outputs) : outputs_(outputs), size_(rows * outputs) {}

  void take(Scratch& scratch, int threads) { scratch.take(beside_, size_ * threads); }

  // Gives a piece of the second layer, whose rows begin there, room for its outputs.
  void put_beside(int thread, int64_t begin, PackedLinearArgs& layer) const {
    layer.out = beside_ + thread * size_ - begin * outputs_;
    layer.out_row = outputs_;
  }

  // The first layer's outputs become the result.
  void multiply(const PackedLinearArgs& first, int64_t begin, int64_t end,
                const PackedLinearArgs& second) const {
    for (int64_t row = begin; row < end; ++row) {
      Element* out = static_cast<Element*>(first.out) + row * first.out_row;
      const Element* with = static_cast<const Element*>(second.out) + row * second.out_row;
      for (int64_t i = 0; i < first.size_out; i += kPanel) {
        alignas(64) float panel[kPanel];
        for (int p = 0; p < kPanel; p += kLanes)
          store(panel + p, silu(load(out + i + p)) * load(with + i + p));
        round_panel(panel, Finish<Element>{nullptr, nullptr}, out + i);
      }
    }
  }

 private:
  int64_t outputs_, size_;
  Element* beside_ = nullptr;
};

}  // namespace compiled_attn
