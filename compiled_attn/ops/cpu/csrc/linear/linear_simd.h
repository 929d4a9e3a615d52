// Linear layers in SIMD registers.
#pragma once

#include <type_traits>

#include "linear/next_weights.h"
#include "scratch.h"
#include "vector/bfloat16.h"

namespace compiled_attn {

#if CA_HAS_BF16_DOT
// bf16 dot products of pairs.
struct Bf16DotProducts {
  using Element = BFloat16;  // of inputs and outputs
  using Input = BFloat16;  // in products
  using Weight = BFloat16;
  static constexpr int kInputs = 2;  // of an output, adjacent in the weight
  static constexpr int64_t kFewRows = 64;
  using Weights = BFloat16x2;
  static CA_INLINE Weights weights(const BFloat16* at) { return in_register(load_bf16x2(at)); }
  static CA_INLINE Weights weights(Ints pairs) { return (Weights)pairs; }
  static CA_INLINE Floats added(Floats sum, Weights weights, const BFloat16* inputs) {
    return dot_bf16(sum, broadcast_bf16x2(inputs), weights);
  }
};
#endif

// Widens the first and second weights of the pairs by shift and mask. Exact for float32 weights
// stored as bfloat16 too. Inputs are float32, one broadcast load each: widening a bfloat16 input
// would take four instructions per product.
template <class Element_>
struct WidenProducts {
  using Element = Element_;
  using Input = float;
  using Weight = BFloat16;
  static constexpr int kInputs = 2;
  static constexpr int64_t kFewRows = 0;
  struct Weights {
    Floats first, second;
  };
  static CA_INLINE Weights weights(const BFloat16* at) { return weights(load_as<Ints>(at)); }
  static CA_INLINE Weights weights(Ints pairs) {
    return {bit_cast<Floats>(pairs << 16), bit_cast<Floats>(pairs & int32_t(0xffff0000))};
  }
  static CA_INLINE Floats added(Floats sum, const Weights& weights, const float* inputs) {
    sum += weights.first * splat(inputs[0]);
    return sum + weights.second * splat(inputs[1]);
  }
};

// float32 weights and inputs.
struct Float32Products {
  using Element = float;
  using Input = float;
  using Weight = float;
  static constexpr int kInputs = 1;
  static constexpr int64_t kFewRows = 0;
  using Weights = Floats;
  static CA_INLINE Weights weights(const float* at) { return in_register(load(at)); }
  static CA_INLINE Floats added(Floats sum, Weights weights, const float* input) {
    return sum + weights * splat(*input);
  }
};

// Rows of the input, widened where products need it.
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
  // Widens one thread's share, before any thread multiplies.
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

// With one block of rows, memory bandwidth is the limit and each stream prefetches its own next
// lines. With several blocks, the weights are read repeatedly, so the next piece is prefetched
// meanwhile; pieces are few panels, so that both fit the caches.
//
// For few rows, bf16 dot products use tall blocks, so that weights are read half as often: products
// finish before L2 delivers the next weights.
template <class Dot>
class LinearSimd {
  using Weight = typename Dot::Weight;
  static constexpr int kInputs = Dot::kInputs;

 public:
  using Element = typename Dot::Element;
  using Input = typename Dot::Input;
  using Inputs = InputRows<Element, Input>;

  static constexpr int kPanels = kRegisters == 32 ? 4 : 1, kTallPanels = 3;  // adjacent
  static constexpr int kRows = 4, kTallRows = 8;
  static constexpr int kVectors = kPanel / kLanes;  // per panel
  // Prefetch distance in weights.
  static constexpr int64_t kAhead = 4096 / sizeof(Weight);

  // Panels per piece.
  static int64_t panels(const PackedLinearArgs& layer, int64_t) {
    return is_tall(layer) ? kTallPanels : 4;
  }

  LinearSimd(const Inputs& inputs, int64_t) : inputs_(inputs) {}

  // Computes the outputs for some rows.
  void run(const PackedLinearArgs& layer, int64_t begin, int64_t end, NextWeights& next) {
    layer_ = layer, next_ = &next;
    if constexpr (Dot::kFewRows > 0)
      if (is_tall(layer)) return blocks<kTallRows, kTallPanels>(begin, end);
    blocks<kRows, kPanels>(begin, end);
  }
  // Outputs are complete after `run`.
  void finish() {}

 private:
  static bool is_tall(const PackedLinearArgs& layer) {
    return layer.rows < Dot::kFewRows;
  }

  // Block sizes: the next smaller one for the remainder.
  static constexpr int smaller(int size) { return size > kRows ? kRows : 1; }
  static constexpr int64_t blocks_of(int64_t count, int size) {
    return count / size + (size > 1 ? blocks_of(count % size, smaller(size)) : 0);
  }

  template <int rows, int panels>
  void blocks(int64_t begin, int64_t end) {
    const int64_t count = layer_.size_out / kPanel;
    const int64_t steps = blocks_of(end - begin, rows) * (count / panels + count % panels);
    prefetcher_ = next_->prefetcher(steps * layer_.size_in / kInputs, layer_.weight);
    const bool once = end - begin <= kRows || blocks_of(end - begin, rows) == 1;
    if (once && layer_.prefetch_l1_once) return across<1, true, rows, panels>(begin, end, count);
    if (once) return across<2, true, rows, panels>(begin, end, count);
    if (layer_.prefetch_l1) return across<1, false, rows, panels>(begin, end, count);
    across<2, false, rows, panels>(begin, end, count);
  }

  // level: the cache to prefetch weights to
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

  // Not inlined, and with running pointers: GCC would otherwise spill some and reload them in each
  // step.
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
    WeightPrefetcher prefetcher = prefetcher_;
    // At the end of a panel, skips to what follows the adjacent panels.
    const int64_t tail = size_in - kAhead / kPanel;
    const int64_t skipped = (panels - 1) * kPanel * size_in;
    for (int64_t k = 0; k < size_in; k += kInputs) {
      if (!once) prefetcher.template prefetch<level>();
      typename Dot::Weights weights[vectors];
#pragma GCC unroll 8
      for (int v = 0; v < vectors; ++v) {
        const Weight* at =
            weight + v / kVectors * kPanel * size_in + v % kVectors * kLanes * kInputs;
        if (once) __builtin_prefetch(at + (k < tail ? kAhead : kAhead + skipped), 0, 4 - level);
        weights[v] = Dot::weights(at);
      }
#pragma GCC unroll 8
      for (int r = 0; r < rows; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; ++v)
          sums[r][v] = Dot::added(sums[r][v], weights[v], input + r * input_row);
      weight += kInputs * kPanel;
      input += kInputs;
    }
    prefetcher_ = prefetcher;
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 8
      for (int p = 0; p < panels; ++p) {
        const int64_t column = (panel + p) * kPanel;
        alignas(64) float of_panel[kPanel];
        for (int v = 0; v < kVectors; ++v) store(of_panel + v * kLanes, sums[r][p * kVectors + v]);
        store_panel(of_panel, epilogue_of<Element>(layer_).from(column),
                    static_cast<Element*>(layer_.out) + (row + r) * layer_.out_row + column);
      }
  }

  const Inputs& inputs_;
  PackedLinearArgs layer_;
  NextWeights* next_;
  WeightPrefetcher prefetcher_;
};

}  // namespace compiled_attn
