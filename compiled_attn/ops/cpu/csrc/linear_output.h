// From sums of a linear layer to rows of its output.
#pragma once

#include "abi.h"
#include "bfloat16_dot.h"

namespace compiled_attn {

constexpr int kPanel = 16;  // outputs whose weights lie together

// Of an element of the weight.
CA_INLINE int64_t weight_bytes(const PackedLinearArgs& layer) {
  if (layer.scale) return 1;
  return layer.dtype == kFloat32 && !layer.is_halves ? sizeof(float) : sizeof(BFloat16);
}

// What sums of outputs are multiplied with and what is added, each or null.
template <class Element>
struct Finish {
  const float* scale;
  const Element* bias;

  CA_INLINE Finish from(int64_t column) const {
    return {scale ? scale + column : nullptr, bias ? bias + column : nullptr};
  }
};

template <class Element>
CA_INLINE Finish<Element> finish_of(const PackedLinearArgs& layer) {
  return {layer.scale, static_cast<const Element*>(layer.bias)};
}

// kLanes sums, finished.
template <class Element>
CA_INLINE Floats finished(const float* sums, Finish<Element> finish, int64_t column) {
  Floats whole = load(sums);
  if (finish.scale) whole *= load(finish.scale + column);
  if (finish.bias) whole += load(finish.bias + column);
  return whole;
}

// kPanel sums, finished.
CA_INLINE void round_panel(const float* sums, Finish<float> finish, float* out) {
  for (int i = 0; i < kPanel; i += kLanes) store(out + i, finished(sums + i, finish, i));
}

// The same, rounded.
CA_INLINE void round_panel(const float* sums, Finish<BFloat16> finish, BFloat16* out) {
  for (int i = 0; i < kPanel; i += kLanes) store(out + i, finished(sums + i, finish, i));
}

// The same of two panels side by side, a line of memory.
CA_INLINE void round_panels(const float* first, const float* second,
                            Finish<BFloat16> finish, BFloat16* out) {
  for (int i = 0; i < 2 * kPanel; i += 2 * kLanes) {
    const auto at = [&](int i) {
      return finished(i < kPanel ? first + i : second + i - kPanel, finish, i);
    };
    store(out + i, at(i), at(i + kLanes));
  }
}

CA_INLINE void round_panels(const float* first, const float* second, Finish<float> finish,
                            float* out) {
  round_panel(first, finish, out);
  round_panel(second, finish.from(kPanel), out + kPanel);
}

}  // namespace compiled_attn
