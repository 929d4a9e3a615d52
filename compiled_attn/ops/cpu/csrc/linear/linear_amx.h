// Linear layers in AMX tiles.
//
// Packed weights are tiles in place, and so are bfloat16 inputs. While a block is multiplied, the
// previous one is rounded and the next weights are prefetched: a tile load that misses stalls all
// tiles.
#pragma once

#include "linear/next_weights.h"
#include "scratch.h"
#include "vector/amx.h"

#if CA_HAS_TILES

namespace compiled_attn {

// Tiles of kTile rows. An input split into several bfloat16 parts has consecutive tiles, one per
// part.
struct InputTiles {
  const BFloat16* data;
  int64_t step;  // elements between tiles
  int64_t stride;  // bytes between rows

  CA_INLINE const BFloat16* tile(int64_t k, int part) const {
    return data + k * step + part * kTilePairs;
  }
};

// bfloat16 inputs in place; copies and zero-pads only a last partial tile.
class TileInputs {
 public:
  using Element = BFloat16;
  static constexpr int kParts = 1;

  TileInputs(const PackedLinearArgs& args, Scratch& scratch)
      : args_(args), whole_(args.rows / kTile * kTile) {
    scratch.take(rest_, whole_ < args.rows ? kTile * args.size_in : 0);
  }
  // Copies one thread's share, before any thread reads tiles.
  void prepare(int thread, int threads) {
    if (whole_ == args_.rows) return;
    for (int64_t i = thread; i < kTile; i += threads) {
      BFloat16* to = rest_ + i * args_.size_in;
      if (whole_ + i < args_.rows)
        std::memcpy(to, row(whole_ + i), args_.size_in * sizeof(BFloat16));
      else
        std::memset(static_cast<void*>(to), 0, args_.size_in * sizeof(BFloat16));
    }
  }
  // The tiles of the rows from `first` on, a multiple of kTile.
  InputTiles rows(int64_t first) const {
    constexpr int64_t kBytes = sizeof(BFloat16);
    if (first < whole_) return {row(first), 2 * kTile, args_.input_row * kBytes};
    return {rest_, 2 * kTile, args_.size_in * kBytes};
  }

 private:
  const BFloat16* row(int64_t i) const {
    return static_cast<const BFloat16*>(args_.input) + i * args_.input_row;
  }

  const PackedLinearArgs& args_;
  int64_t whole_;
  BFloat16* rest_;
};

// float32 inputs split into three bfloat16 of eight bits each, so that products with bfloat16
// weights are exact: three tile products, at 16 times the rate of multiply-adds. Subnormal parts
// are lost, and infinite weights give NaN.
class SplitInputs {
 public:
  using Element = float;
  static constexpr int kParts = 3;

  SplitInputs(const PackedLinearArgs& args, Scratch& scratch)
      : args_(args), steps_(args.size_in / (2 * kTile)) {
    scratch.take(tiles_, tiles() * kParts * kTilePairs);
  }
  void prepare(int thread, int threads) {
    for (int64_t i = thread; i < tiles(); i += threads) split(i / steps_ * kTile, i % steps_);
  }
  InputTiles rows(int64_t first) const {
    constexpr int64_t kStep = kParts * kTilePairs;
    return {tiles_ + first / kTile * steps_ * kStep, kStep, 2 * kTile * sizeof(BFloat16)};
  }

 private:
  int64_t tiles() const { return (args_.rows + kTile - 1) / kTile * steps_; }

  // Splits the rows from `first` on, inputs from k * 2 * kTile on; zero-pads rows.
  void split(int64_t first, int64_t k) {
    BFloat16* to = tiles_ + (first / kTile * steps_ + k) * kParts * kTilePairs;
    const auto* from = static_cast<const float*>(args_.input) + first * args_.input_row;
    for (int64_t i = 0; i < kTile; ++i, from += args_.input_row)
      for (int64_t j = 0; j < 2 * kTile; j += kLanes, to += kLanes) {
        Floats rest = first + i < args_.rows ? load(from + k * 2 * kTile + j) : Floats{};
        for (int part = 0; part < kParts; ++part) {
          const Floats upper = bit_cast<Floats>(bit_cast<Ints>(rest) & splat(int32_t(0xffff0000)));
          put_upper(upper, to + part * kTilePairs);
          // Infinity leaves no remainder; NaN must stay, though its upper half may look infinite.
          rest = select(rest == upper, Floats{}, rest - upper);
        }
      }
  }

  static CA_INLINE void put_upper(Floats v, BFloat16* to) {
    const U16s upper = __builtin_convertvector(bit_cast<Ints>(v) >> 16, U16s);
    std::memcpy(static_cast<void*>(to), &upper, sizeof upper);
  }

  const PackedLinearArgs& args_;
  int64_t steps_;  // tiles per row of tiles
  BFloat16* tiles_;
};

// A block of sums on its way to the output.
template <class Element>
class LinearBlock {
 public:
  alignas(64) float sums[4][kTileFloats];

  void begin(const PackedLinearArgs& args, int64_t row, int64_t rows, int64_t column, int panels) {
    next_out_ = out_ = static_cast<Element*>(args.out) + row * args.out_row + column;
    out_row_ = args.out_row;
    finish_ = epilogue_of<Element>(args).from(column);
    rounded_ = 0, rows_ = rows, panels_ = panels;
  }
  // Prefetches the next row of the output, which is written later.
  CA_INLINE void prefetch_output() {
    __builtin_prefetch(next_out_, 1, 2);
    next_out_ += out_row_;
  }
  CA_INLINE void round_row() {
    if (rounded_ == rows_) return;
    const float* row = sums[rounded_ / kTile * panels_] + rounded_ % kTile * kTile;
    int p = 0;
    for (; p + 2 <= panels_; p += 2)
      store_panel_pair(row + p * kTileFloats, row + (p + 1) * kTileFloats, finish_.from(p * kPanel),
                   out_ + p * kPanel);
    if (p < panels_)
      store_panel(row + p * kTileFloats, finish_.from(p * kPanel), out_ + p * kPanel);
    out_ += out_row_, ++rounded_;
  }
  void round_rest() {
    while (rounded_ < rows_) round_row();
  }

 private:
  Element *out_, *next_out_;
  Epilogue<Element> finish_;
  int64_t out_row_, rounded_ = 0, rows_ = 0;
  int panels_;  // adjacent tiles
};

template <class Inputs_>
class LinearAmx {
 public:
  using Inputs = Inputs_;
  using Element = typename Inputs::Element;
  using Input = Element;  // determines the rows of a piece

  static int64_t panels(const PackedLinearArgs&, int64_t of_thread) {
    return NextWeights::panels(of_thread);
  }

  LinearAmx(const Inputs& inputs, int64_t size_in)
      : inputs_(inputs), panel_(kTile * size_in) {}
  ~LinearAmx() { finish(); }

  // Computes the outputs for some rows; `begin` is a multiple of kTile.
  void run(const PackedLinearArgs& layer, int64_t begin, int64_t end, NextWeights& next) {
    layer_ = layer, next_ = &next;
    const bool is_wide = end - begin <= kTile;  // 1 x 4 tiles, else 2 x 2
    const int64_t blocks = (end - begin + 2 * kTile - 1) / (2 * kTile);
    lines_ = 2 * (is_wide ? 2 * kTile : kTile / blocks);
    int64_t row = begin;
    for (; row + kTile < end; row += 2 * kTile) columns<2, 2>(row, end);
    if (row < end) columns<1, 4>(row, end);
  }
  // Writes the last outputs.
  void finish() { blocks_[!turn_].round_rest(); }

 private:
  template <int rows, int panels>
  void columns(int64_t row, int64_t end) {
    const int64_t panel_end = layer_.size_out / kPanel;
    int64_t panel = 0;
    for (; panel + panels <= panel_end; panel += panels) block<rows, panels>(row, end, panel);
    for (; panel < panel_end; ++panel) block<rows, 1>(row, end, panel);
  }

  // Computes rows x panels tiles of sums, at most four.
  template <int rows, int panels>
  CA_INLINE void block(int64_t row, int64_t end, int64_t panel) {
    const InputTiles a = inputs_.rows(row);
    const InputTiles a_next = rows == 2 ? inputs_.rows(row + kTile) : a;
    const BFloat16* b = weights_of(panel);
    LinearBlock<Element> &now = blocks_[turn_], &before = blocks_[!turn_];
    now.begin(layer_, row, std::min<int64_t>(end - row, rows * kTile), panel * kPanel, panels);
    tiles_.zero<0>(), tiles_.zero<1>(), tiles_.zero<2>(), tiles_.zero<3>();
    for (int64_t k = 0; k < panel_; k += kTilePairs) {
      next_->take(lines_);
#pragma GCC unroll 3
      for (int part = 0; part < Inputs::kParts; ++part) {
        tiles_.load<4>(a.tile(k / kTilePairs, part), a.stride), tiles_.load<6>(b + k);
        tiles_.multiply_add<0, 4, 6>();
        if constexpr (rows == 2) {
          tiles_.load<5>(a_next.tile(k / kTilePairs, part), a_next.stride);
          tiles_.multiply_add<panels, 5, 6>();
        }
        if constexpr (panels > 1) {
          tiles_.load<7>(b + panel_ + k);
          tiles_.multiply_add<1, 4, 7>();
          if constexpr (rows == 2) tiles_.multiply_add<3, 5, 7>();
        }
        if constexpr (panels == 4) {
          tiles_.load<6>(b + 2 * panel_ + k);
          tiles_.multiply_add<2, 4, 6>();
          tiles_.load<7>(b + 3 * panel_ + k);
          tiles_.multiply_add<3, 4, 7>();
        }
      }
      before.round_row(), before.round_row();
      if (k < rows * kTile / 2 * kTilePairs) now.prefetch_output(), now.prefetch_output();
    }
    before.round_rest();
    tiles_.store<0>(now.sums[0]), tiles_.store<1>(now.sums[1]);
    tiles_.store<2>(now.sums[2]), tiles_.store<3>(now.sums[3]);
    turn_ = !turn_;
  }

  const BFloat16* weights_of(int64_t panel) const {
    return static_cast<const BFloat16*>(layer_.weight) + panel * panel_;
  }

  PackedLinearArgs layer_;
  const Inputs& inputs_;
  TileRegisters tiles_;
  int64_t panel_;  // elements
  NextWeights* next_;
  int64_t lines_;  // per step
  LinearBlock<Element> blocks_[2];
  bool turn_ = false;
};

}  // namespace compiled_attn

#endif
