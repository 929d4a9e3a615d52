// Rows of a linear layer in vector registers: some rows against some panels of weights.
#pragma once

#include "bfloat16_dot.h"
#include "linear_weights.h"
#include "scratch.h"

namespace compiled_attn {

#if CA_HAS_BFLOAT16_DOT
// A weight is a vector of pairs, multiplied with a pair of inputs at once.
struct PairProducts {
  using Element = BFloat16;  // of inputs and outputs
  using Weight = BFloat16;
  static constexpr int kInputs = 2;  // of an output, that lie together
  static constexpr int kSteps = 1;   // of these at once
  using Weights = Pairs;
  static CA_INLINE Weights weights(const BFloat16* at) { return held(pairs_at(at)); }
  static CA_INLINE Floats added(Floats sum, Weights weights, const BFloat16* inputs) {
    return add_products(sum, same_pair(inputs), weights);
  }
};
#endif

// First and second weights of the pairs apart. A bfloat16 is the upper half of a float, so these are
// weights of float32 too where the lower halves are zeros.
template <class Element_>
struct FloatProducts {
  using Element = Element_;
  using Weight = BFloat16;
  static constexpr int kInputs = 2, kSteps = 2;
  struct Weights {
    Floats first, second;
  };
  static CA_INLINE Weights weights(const BFloat16* at) {
    const Ints pairs = load_as<Ints>(at);
    return {bits_as<Floats>(pairs << 16), bits_as<Floats>(pairs & int32_t(0xffff0000))};
  }
  static CA_INLINE Floats added(Floats sum, const Weights& weights, const Element* inputs) {
    sum += weights.first * all(single(inputs[0]));
    return sum + weights.second * all(single(inputs[1]));
  }
  static CA_INLINE float single(float x) { return x; }
  static CA_INLINE float single(BFloat16 x) { return bits_as<float>(uint32_t{x.bits} << 16); }
};

// Weights and inputs of float32.
struct SingleProducts {
  using Element = float;
  using Weight = float;
  static constexpr int kInputs = 1, kSteps = 1;
  using Weights = Floats;
  static CA_INLINE Weights weights(const float* at) { return held(load(at)); }
  static CA_INLINE Floats added(Floats sum, Weights weights, const float* input) {
    return sum + weights * all(*input);
  }
};

// Where weights are read once, memory sets the pace, and each stream asks for its own next lines.
// Where they are read for block after block of rows, the first of them would wait: what the next
// piece needs is asked for meanwhile.
template <class Products>
class LinearRows {
  using Weight = typename Products::Weight;
  static constexpr int kInputs = Products::kInputs;

 public:
  using Element = typename Products::Element;
  // Rows are taken as they are.
  struct Inputs {
    Inputs(const PackedLinearArgs&, Scratch&) {}
    void prepare(int, int) {}
  };

  static constexpr int kPanels = kRegisters == 32 ? 4 : 1;  // side by side
  static constexpr int kRows = 4;                           // below each other
  static constexpr int kVectors = kPanel / kLanes;          // of a panel
  // Multiplications of a line of weights by a row.
  static constexpr int64_t kProductsOfLine =
      NextWeights::kLine / int64_t(sizeof(Floats)) * Products::kSteps;
  // Weights between what is read and what is asked for.
  static constexpr int64_t kAhead = 4096 / sizeof(Weight);

  LinearRows(const Inputs&, int64_t) {}

  // Outputs of a layer for some rows.
  void run(const PackedLinearArgs& layer, int64_t begin, int64_t end, NextWeights& next) {
    layer_ = layer, next_ = &next;
    const int64_t panels = layer.size_out / kPanel;
    steps_ = blocks(end - begin, kRows) * blocks(panels, kPanels) * (layer.scale ? 2 : 1);
    if (end - begin <= kRows)
      panels_of<true>(begin, end, panels);
    else
      panels_of<false>(begin, end, panels);
  }
  // All outputs are there as soon as they are summed up.
  void finish() {}

 private:
  static int64_t blocks(int64_t count, int64_t size) { return count / size + count % size; }

  template <bool once>
  void panels_of(int64_t begin, int64_t end, int64_t panels) {
    int64_t p = 0;
    for (; p + kPanels <= panels; p += kPanels) columns<once, kPanels>(begin, end, p);
    for (; p < panels; ++p) columns<once, 1>(begin, end, p);
  }

  template <bool once, int panels>
  void columns(int64_t begin, int64_t end, int64_t panel) {
    int64_t row = begin;
    for (; row + kRows <= end; row += kRows) block<once, kRows, panels>(row, panel);
    for (; row < end; ++row) block<once, 1, panels>(row, panel);
  }

  // Not inlined, and with pointers that go along: else GCC keeps some of them in memory and fetches
  // them for each step, which slows bfloat16 down.
  template <bool once, int rows, int panels>
  CA_NOINLINE void block(int64_t row, int64_t panel) {
    constexpr int vectors = panels * kVectors;
    const int64_t size_in = layer_.size_in, input_row = layer_.input_row;
    const auto* input = static_cast<const Element*>(layer_.input) + row * input_row;
    const auto* weight = static_cast<const Weight*>(layer_.weight) + panel * kPanel * size_in;
    Floats sums[rows][vectors];
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) sums[r][v] = Floats{};
    for (int64_t k = 0; k < size_in;) {
      // A line of each panel of the next piece for a line of each panel of this one.
      if (!once) next_->take_line();
      const int64_t end = once ? size_in : std::min(k + kInputs * steps_, size_in);
      for (; k < end; k += kInputs) {
        typename Products::Weights weights[vectors];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; ++v) {
          const Weight* at =
              weight + v / kVectors * kPanel * size_in + v % kVectors * kLanes * kInputs;
          if (once) __builtin_prefetch(at + kAhead, 0, 2);
          weights[v] = Products::weights(at);
        }
#pragma GCC unroll 4
        for (int r = 0; r < rows; ++r)
#pragma GCC unroll 4
          for (int v = 0; v < vectors; ++v)
            sums[r][v] = Products::added(sums[r][v], weights[v], input + r * input_row);
        weight += kInputs * kPanel;
        input += kInputs;
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 4
      for (int p = 0; p < panels; ++p) {
        const int64_t column = (panel + p) * kPanel;
        alignas(64) float of_panel[kPanel];
        for (int v = 0; v < kVectors; ++v) store(of_panel + v * kLanes, sums[r][p * kVectors + v]);
        round_panel(of_panel, finish_of<Element>(layer_).from(column),
                    static_cast<Element*>(layer_.out) + (row + r) * layer_.out_row + column);
      }
  }

  PackedLinearArgs layer_;
  NextWeights* next_;
  int64_t steps_;  // of kInputs for each line of the next piece
};

}  // namespace compiled_attn
