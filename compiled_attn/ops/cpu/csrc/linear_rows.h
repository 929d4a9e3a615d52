// Rows of a linear layer in vector registers: some rows against some panels of weights.
#pragma once

#include <type_traits>

#include "bfloat16_dot.h"
#include "linear_weights.h"
#include "scratch.h"

namespace compiled_attn {

#if CA_HAS_BFLOAT16_DOT
// A weight is a vector of pairs, multiplied with a pair of inputs at once.
struct PairProducts {
  using Element = BFloat16;  // of inputs and outputs
  using Input = BFloat16;    // as it is multiplied
  using Weight = BFloat16;
  static constexpr int kInputs = 2;  // of an output, that lie together
  static constexpr int64_t kFewRows = 64;
  using Weights = Pairs;
  static CA_INLINE Weights weights(const BFloat16* at) { return held(pairs_at(at)); }
  static CA_INLINE Floats added(Floats sum, Weights weights, const BFloat16* inputs) {
    return add_products(sum, same_pair(inputs), weights);
  }
};
#endif

// First and second weights of the pairs apart. A bfloat16 is the upper half of a float, so these are
// weights of float32 too where the lower halves are zeros. Inputs are floats, one load for all lanes:
// to widen a bfloat16 would take four instructions at each of its products.
template <class Element_>
struct FloatProducts {
  using Element = Element_;
  using Input = float;
  using Weight = BFloat16;
  static constexpr int kInputs = 2;
  static constexpr int64_t kFewRows = 0;
  struct Weights {
    Floats first, second;
  };
  static CA_INLINE Weights weights(const BFloat16* at) {
    const Ints pairs = load_as<Ints>(at);
    return {bits_as<Floats>(pairs << 16), bits_as<Floats>(pairs & int32_t(0xffff0000))};
  }
  static CA_INLINE Floats added(Floats sum, const Weights& weights, const float* inputs) {
    sum += weights.first * all(inputs[0]);
    return sum + weights.second * all(inputs[1]);
  }
};

// Weights and inputs of float32.
struct SingleProducts {
  using Element = float;
  using Input = float;
  using Weight = float;
  static constexpr int kInputs = 1;
  static constexpr int64_t kFewRows = 0;
  using Weights = Floats;
  static CA_INLINE Weights weights(const float* at) { return held(load(at)); }
  static CA_INLINE Floats added(Floats sum, Weights weights, const float* input) {
    return sum + weights * all(*input);
  }
};

// The rows of an input: as they are, or widened.
template <class Element, class Input>
class InputRows {
 public:
  InputRows(const PackedLinearArgs& args, Scratch& scratch)
      : args_(args), stride_(args.input_row), rows_(static_cast<const Input*>(args.input)) {
    if constexpr (kWidens) {
      stride_ = args.size_in;
      scratch.take(wide_, args.rows * stride_);
      rows_ = wide_;
    }
  }
  // What one of some threads has to widen, before any of them multiplies.
  void prepare(int thread, int threads) const {
    if constexpr (kWidens)
      for (int64_t i = thread; i < args_.rows; i += threads)
        to_floats(static_cast<const Element*>(args_.input) + i * args_.input_row, args_.size_in,
                  wide_ + i * stride_);
  }
  CA_INLINE const Input* row(int64_t i) const { return rows_ + i * stride_; }
  int64_t stride() const { return stride_; }

 private:
  static constexpr bool kWidens = !std::is_same_v<Element, Input>;

  const PackedLinearArgs& args_;
  int64_t stride_;
  const Input* rows_;
  Input* wide_ = nullptr;
};

// Where one block takes all rows, or rows are as few, memory sets the pace, and each stream asks for
// its own next lines. Where weights are read for block after block, the first of them would wait:
// the next piece is asked for meanwhile. A piece is few panels, so that both stay in the caches.
//
// Of few rows blocks of pairs are tall, so that weights are read half as often: their products are
// done before the second level cache has given the next.
template <class Products>
class LinearRows {
  using Weight = typename Products::Weight;
  static constexpr int kInputs = Products::kInputs;

 public:
  using Element = typename Products::Element;
  using Input = typename Products::Input;
  using Inputs = InputRows<Element, Input>;

  static constexpr int kPanels = kRegisters == 32 ? 4 : 1, kTallPanels = 3;  // side by side
  static constexpr int kRows = 4, kTallRows = 8;                             // below each other
  static constexpr int kVectors = kPanel / kLanes;                           // of a panel
  // Weights between what is read and what is asked for.
  static constexpr int64_t kAhead = 4096 / sizeof(Weight);

  // Of a piece, where a thread has so many.
  static int64_t panels(const PackedLinearArgs& layer, int64_t of_thread) {
    if (layer.scale) return NextWeights::panels(of_thread);
    return is_tall(layer) ? kTallPanels : 4;
  }

  LinearRows(const Inputs& inputs, int64_t) : inputs_(inputs) {}

  // Outputs of a layer for some rows.
  void run(const PackedLinearArgs& layer, int64_t begin, int64_t end, NextWeights& next) {
    layer_ = layer, next_ = &next;
    if constexpr (Products::kFewRows > 0)
      if (is_tall(layer)) return blocks<kTallRows, kTallPanels>(begin, end);
    blocks<kRows, kPanels>(begin, end);
  }
  // All outputs are there as soon as they are summed up.
  void finish() {}

 private:
  static bool is_tall(const PackedLinearArgs& layer) {
    return !layer.scale && layer.rows < Products::kFewRows;
  }

  // Sizes of blocks, the next smaller after the last that is whole.
  static constexpr int smaller(int size) { return size > kRows ? kRows : 1; }
  static constexpr int64_t blocks_of(int64_t count, int size) {
    return count / size + (size > 1 ? blocks_of(count % size, smaller(size)) : 0);
  }

  template <int rows, int panels>
  void blocks(int64_t begin, int64_t end) {
    const int64_t count = layer_.size_out / kPanel;
    const int64_t steps = blocks_of(end - begin, rows) * (count / panels + count % panels);
    widened_after_ = layer_.scale ? 2 * steps : layer_.size_in;
    asked_ = next_->asked(steps * layer_.size_in / kInputs, layer_.weight);
    const bool once = end - begin <= kRows || blocks_of(end - begin, rows) == 1;
    if (once ? layer_.asks_near_once : layer_.asks_near)
      across<1, rows, panels>(begin, end, count, once);
    else
      across<2, rows, panels>(begin, end, count, once);
  }

  // level: of the cache that weights are to come to.
  template <int level, int rows, int panels>
  void across(int64_t begin, int64_t end, int64_t count, bool once) {
    if (once)
      across<level, true, rows, panels>(begin, end, count);
    else
      across<level, false, rows, panels>(begin, end, count);
  }

  template <int level, bool once, int rows, int panels>
  void across(int64_t begin, int64_t end, int64_t count) {
    int64_t p = 0;
    for (; p + panels <= count; p += panels) down<level, once, rows, panels>(begin, end, p);
    for (; p < count; ++p) down<level, once, rows, 1>(begin, end, p);
  }

  template <int level, bool once, int rows, int panels>
  void down(int64_t row, int64_t end, int64_t panel) {
    for (; row + rows <= end; row += rows) block<level, once, rows, panels>(row, panel);
    if constexpr (rows > 1) down<level, once, smaller(rows), panels>(row, end, panel);
  }

  // Not inlined, and with pointers that go along: else GCC keeps some of them in memory and fetches
  // them for each step, which slows bfloat16 down.
  template <int level, bool once, int rows, int panels>
  CA_NOINLINE void block(int64_t row, int64_t panel) {
    constexpr int vectors = panels * kVectors;
    const int64_t size_in = layer_.size_in, input_row = inputs_.stride();
    const Input* input = inputs_.row(row);
    const auto* weight = static_cast<const Weight*>(layer_.weight) + panel * kPanel * size_in;
    Floats sums[rows][vectors];
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < vectors; ++v) sums[r][v] = Floats{};
    AskedWeights asked = asked_;
    // At the end of panels those are asked for that come behind all of them.
    const int64_t tail = size_in - kAhead / kPanel;
    const int64_t skipped = layer_.scale ? 0 : (panels - 1) * kPanel * size_in;
    for (int64_t k = 0; k < size_in;) {
      // A line of each panel of the next piece for a line of each panel of this one.
      if (!once) next_->widen_line();
      const int64_t end = once ? size_in : std::min(k + kInputs * widened_after_, size_in);
      for (; k < end; k += kInputs) {
        if (!once) asked.template ask<level>();
        typename Products::Weights weights[vectors];
#pragma GCC unroll 8
        for (int v = 0; v < vectors; ++v) {
          const Weight* at =
              weight + v / kVectors * kPanel * size_in + v % kVectors * kLanes * kInputs;
          if (once) __builtin_prefetch(at + (k < tail ? kAhead : kAhead + skipped), 0, 4 - level);
          weights[v] = Products::weights(at);
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; ++r)
#pragma GCC unroll 8
          for (int v = 0; v < vectors; ++v)
            sums[r][v] = Products::added(sums[r][v], weights[v], input + r * input_row);
        weight += kInputs * kPanel;
        input += kInputs;
      }
    }
    asked_ = asked;
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 8
      for (int p = 0; p < panels; ++p) {
        const int64_t column = (panel + p) * kPanel;
        alignas(64) float of_panel[kPanel];
        for (int v = 0; v < kVectors; ++v) store(of_panel + v * kLanes, sums[r][p * kVectors + v]);
        round_panel(of_panel, finish_of<Element>(layer_).from(column),
                    static_cast<Element*>(layer_.out) + (row + r) * layer_.out_row + column);
      }
  }

  const Inputs& inputs_;
  PackedLinearArgs layer_;
  NextWeights* next_;
  AskedWeights asked_;
  int64_t widened_after_;  // steps of kInputs, a line of the next piece
};

}  // namespace compiled_attn
