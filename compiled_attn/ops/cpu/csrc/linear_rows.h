// Rows of a linear layer in vector registers: some rows against a panel of weights.
#pragma once

#include "bfloat16_dot.h"
#include "linear_output.h"

namespace compiled_attn {

#if CA_HAS_BFLOAT16_DOT
// A weight is a vector of pairs, multiplied with a pair of inputs at once.
struct PairProducts {
  using Weights = Pairs;
  static CA_INLINE Weights weights(const BFloat16* at) { return pairs_at(at); }
  static CA_INLINE Floats added(Floats sum, Weights weights, const BFloat16* inputs) {
    return add_products(sum, same_pair(inputs), weights);
  }
};
#endif

// First and second elements of the pairs apart.
struct FloatProducts {
  struct Weights {
    Floats first, second;
  };
  static CA_INLINE Weights weights(const BFloat16* at) {
    const Ints pairs = load_as<Ints>(at);
    return {bits_as<Floats>(pairs << 16), bits_as<Floats>(pairs & int32_t(0xffff0000))};
  }
  static CA_INLINE Floats added(Floats sum, const Weights& weights, const BFloat16* inputs) {
    sum += weights.first * all(bits_as<float>(uint32_t{inputs[0].bits} << 16));
    return sum + weights.second * all(bits_as<float>(uint32_t{inputs[1].bits} << 16));
  }
};

#if CA_HAS_BFLOAT16_DOT
using LinearProducts = PairProducts;
#else
using LinearProducts = FloatProducts;
#endif

class LinearRows {
 public:
  static constexpr int kPanels = kRegisters == 32 ? 4 : 1;  // side by side
  static constexpr int kRows = 4;                           // below each other
  static constexpr int kVectors = kPanel / kLanes;          // of a panel
  static constexpr int64_t kAhead = 2048;  // elements between what is read and what is asked for

  explicit LinearRows(const PackedLinearArgs& layer) : args_(layer) {}

  // Outputs of a layer for some rows.
  void run(int64_t begin, int64_t end) const {
    const int64_t panels = args_.size_out / kPanel;
    int64_t p = 0;
    for (; p + kPanels <= panels; p += kPanels) columns<kPanels>(begin, end, p);
    for (; p < panels; ++p) columns<1>(begin, end, p);
  }

 private:
  template <int panels>
  void columns(int64_t begin, int64_t end, int64_t panel) const {
    int64_t row = begin;
    for (; row + kRows <= end; row += kRows) block<kRows, panels>(row, panel);
    for (; row < end; ++row) block<1, panels>(row, panel);
  }

  template <int rows, int panels>
  void block(int64_t row, int64_t panel) const {
    constexpr int vectors = panels * kVectors;
    const auto* input = static_cast<const BFloat16*>(args_.input) + row * args_.input_row;
    const auto* weight =
        static_cast<const BFloat16*>(args_.weight) + panel * kPanel * args_.size_in;
    alignas(64) Floats sums[rows][vectors] = {};
    for (int64_t k = 0; k < args_.size_in; k += 2) {
      for (int v = 0; v < vectors; ++v) {
        const BFloat16* at =
            weight + v / kVectors * kPanel * args_.size_in + k * kPanel + v % kVectors * kLanes * 2;
        __builtin_prefetch(at + kAhead, 0, 2);
        const auto weights = LinearProducts::weights(at);
        for (int r = 0; r < rows; ++r)
          sums[r][v] = LinearProducts::added(sums[r][v], weights, input + r * args_.input_row + k);
      }
    }
    for (int r = 0; r < rows; ++r)
      for (int p = 0; p < panels; ++p) {
        const int64_t column = (panel + p) * kPanel;
        round_panel(reinterpret_cast<const float*>(&sums[r][p * kVectors]),
                    finish_of(args_).from(column),
                    static_cast<BFloat16*>(args_.out) + (row + r) * args_.out_row + column);
      }
  }

  const PackedLinearArgs& args_;
};

}  // namespace compiled_attn
