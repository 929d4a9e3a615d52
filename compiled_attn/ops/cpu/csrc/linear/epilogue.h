// Bias and rounding of a linear layer's sums.
#pragma once

#include "abi.h"
#include "scratch.h"
#include "vector/bfloat16.h"
#include "vector/vmath.h"

namespace compiled_attn {

constexpr int kPanel = 16;  // outputs packed together

// Bytes of an element of the weight.
CA_INLINE int64_t weight_bytes(const PackedLinearArgs& layer) {
  return layer.dtype == kFloat32 && !layer.weight_is_bf16 ? sizeof(float) : sizeof(BFloat16);
}

// Adds the bias, which may be null.
template <class Element>
struct Epilogue {
  const Element* bias;

  CA_INLINE Epilogue from(int64_t column) const {
    return {bias ? bias + column : nullptr};
  }
};

template <class Element>
CA_INLINE Epilogue<Element> epilogue_of(const PackedLinearArgs& layer) {
  return {static_cast<const Element*>(layer.bias)};
}

// Applies it to kLanes sums.
template <class Element>
CA_INLINE Floats apply_epilogue(const float* sums, Epilogue<Element> finish, int64_t column) {
  Floats whole = load(sums);
  if (finish.bias) whole += load(finish.bias + column);
  return whole;
}

CA_INLINE void store_panel(const float* sums, Epilogue<float> finish, float* out) {
  for (int i = 0; i < kPanel; i += kLanes) store(out + i, apply_epilogue(sums + i, finish, i));
}

CA_INLINE void store_panel(const float* sums, Epilogue<BFloat16> finish, BFloat16* out) {
  for (int i = 0; i < kPanel; i += kLanes) store(out + i, apply_epilogue(sums + i, finish, i));
}

// Stores two adjacent panels, a cache line.
CA_INLINE void store_panel_pair(const float* first, const float* second,
                            Epilogue<BFloat16> finish, BFloat16* out) {
  for (int i = 0; i < 2 * kPanel; i += 2 * kLanes) {
    const auto at = [&](int i) {
      return apply_epilogue(i < kPanel ? first + i : second + i - kPanel, finish, i);
    };
    store(out + i, at(i), at(i + kLanes));
  }
}

CA_INLINE void store_panel_pair(const float* first, const float* second, Epilogue<float> finish,
                            float* out) {
  store_panel(first, finish, out);
  store_panel(second, finish.from(kPanel), out + kPanel);
}

// Holds a piece of up's outputs per thread.
template <class Element>
class SwiGlu {
 public:
  // rows, outputs: of a piece, at most
  SwiGlu(int64_t rows, int64_t outputs) : outputs_(outputs), size_(rows * outputs) {}

  void take(Scratch& scratch, int threads) { scratch.take(up_output_, size_ * threads); }

  // Points the up layer of a piece, whose rows begin at `begin`, to the thread's buffer.
  void set_up_output(int thread, int64_t begin, PackedLinearArgs& layer) const {
    layer.out = up_output_ + thread * size_ - begin * outputs_;
    layer.out_row = outputs_;
  }

  // Multiplies in place of the gate's outputs.
  void multiply(const PackedLinearArgs& first, int64_t begin, int64_t end,
                const PackedLinearArgs& second) const {
    for (int64_t row = begin; row < end; ++row) {
      Element* out = static_cast<Element*>(first.out) + row * first.out_row;
      const Element* with = static_cast<const Element*>(second.out) + row * second.out_row;
      for (int64_t i = 0; i < first.size_out; i += kPanel) {
        alignas(64) float panel[kPanel];
        for (int p = 0; p < kPanel; p += kLanes)
          store(panel + p, vsilu(load(out + i + p)) * load(with + i + p));
        store_panel(panel, Epilogue<Element>{nullptr}, out + i);
      }
    }
  }

 private:
  int64_t outputs_, size_;
  Element* up_output_ = nullptr;
};

}  // namespace compiled_attn
