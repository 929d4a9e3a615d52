// Rows of a linear layer in products of tiles.
//
// Weights are tiles as they are kept, and so is an input of bfloat16 but for its last rows. While a
// block is multiplied, the one before is rounded, and memory is asked for that comes next: a tile
// that waits for its lines stops all others.
#pragma once

#include "linear_inputs.h"
#include "linear_weights.h"

#if CA_HAS_TILES

namespace compiled_attn {

// A block of sums, on its way to the output.
template <class Element>
class LinearBlock {
 public:
  alignas(64) float sums[4][kTileFloats];

  void begin(const PackedLinearArgs& args, int64_t row, int64_t rows, int64_t column, int panels) {
    next_out_ = out_ = static_cast<Element*>(args.out) + row * args.out_row + column;
    out_row_ = args.out_row;
    finish_ = finish_of<Element>(args).from(column);
    rounded_ = 0, rows_ = rows, panels_ = panels;
  }
  // Asks for the next row of the output, which is written later.
  CA_INLINE void ask() {
    __builtin_prefetch(next_out_, 1, 2);
    next_out_ += out_row_;
  }
  CA_INLINE void round_row() {
    if (rounded_ == rows_) return;
    const float* row = sums[rounded_ / kTile * panels_] + rounded_ % kTile * kTile;
    int p = 0;
    for (; p + 2 <= panels_; p += 2)
      round_panels(row + p * kTileFloats, row + (p + 1) * kTileFloats, finish_.from(p * kPanel),
                   out_ + p * kPanel);
    if (p < panels_)
      round_panel(row + p * kTileFloats, finish_.from(p * kPanel), out_ + p * kPanel);
    out_ += out_row_, ++rounded_;
  }
  void round_rest() {
    while (rounded_ < rows_) round_row();
  }

 private:
  Element *out_, *next_out_;
  Finish<Element> finish_;
  int64_t out_row_, rounded_ = 0, rows_ = 0;
  int panels_;  // tiles side by side
};

template <class Inputs_>
class LinearTiles {
 public:
  using Inputs = Inputs_;
  using Element = typename Inputs::Element;
  using Input = Element;  // of which so many bytes are taken at once

  static int64_t panels(const PackedLinearArgs&, int64_t of_thread) {
    return NextWeights::panels(of_thread);
  }

  LinearTiles(const Inputs& inputs, int64_t size_in)
      : inputs_(inputs), panel_(kTile * size_in) {}
  ~LinearTiles() { finish(); }

  // Outputs of a layer for some rows; `begin` is a multiple of kTile.
  void run(const PackedLinearArgs& layer, int64_t begin, int64_t end, NextWeights& next) {
    layer_ = layer, next_ = &next;
    const bool is_wide = end - begin <= kTile;  // 1 x 4 tiles, else 2 x 2
    const int64_t blocks = (end - begin + 2 * kTile - 1) / (2 * kTile);
    lines_ = (is_wide ? 2 * kTile : kTile / blocks) * (layer.scale ? 1 : 2);
    int64_t row = begin;
    for (; row + kTile < end; row += 2 * kTile) columns<2, 2>(row, end);
    if (row < end) columns<1, 4>(row, end);
  }
  // Until then the last of the outputs are not there.
  void finish() { blocks_[!turn_].round_rest(); }

 private:
  template <int rows, int panels>
  void columns(int64_t row, int64_t end) {
    const int64_t panel_end = layer_.size_out / kPanel;
    int64_t panel = 0;
    for (; panel + panels <= panel_end; panel += panels) block<rows, panels>(row, end, panel);
    for (; panel < panel_end; ++panel) block<rows, 1>(row, end, panel);
  }

  // rows x panels tiles of sums, four at most.
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
        tiles_.add_products<0, 4, 6>();
        if constexpr (rows == 2) {
          tiles_.load<5>(a_next.tile(k / kTilePairs, part), a_next.stride);
          tiles_.add_products<panels, 5, 6>();
        }
        if constexpr (panels > 1) {
          tiles_.load<7>(b + panel_ + k);
          tiles_.add_products<1, 4, 7>();
          if constexpr (rows == 2) tiles_.add_products<3, 5, 7>();
        }
        if constexpr (panels == 4) {
          tiles_.load<6>(b + 2 * panel_ + k);
          tiles_.add_products<2, 4, 6>();
          tiles_.load<7>(b + 3 * panel_ + k);
          tiles_.add_products<3, 4, 7>();
        }
      }
      before.round_row(), before.round_row();
      if (k < rows * kTile / 2 * kTilePairs) now.ask(), now.ask();
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
  int64_t lines_;  // of them at a time
  LinearBlock<Element> blocks_[2];
  bool turn_ = false;
};

}  // namespace compiled_attn

#endif
