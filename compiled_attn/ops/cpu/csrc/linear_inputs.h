// The input of a linear layer as tiles of kTile rows and 2 * kTile inputs.
#pragma once

#include "linear_output.h"
#include "scratch.h"
#include "tile_registers.h"

#if CA_HAS_TILES

namespace compiled_attn {

// Tiles of kTile rows. Where a number is a sum of several of bfloat16, each of these is a part, and
// its tiles lie behind one another.
struct InputTiles {
  const BFloat16* data;
  int64_t step;    // elements, from tile to tile
  int64_t stride;  // bytes, from row to row

  CA_INLINE const BFloat16* tile(int64_t k, int part) const {
    return data + k * step + part * kTilePairs;
  }
};

// An input of bfloat16 as it is, but for the last rows where they are fewer than kTile: those are
// copied, with zeros behind.
class TileInputs {
 public:
  using Element = BFloat16;
  static constexpr int kParts = 1;

  TileInputs(const PackedLinearArgs& args, Scratch& scratch)
      : args_(args), whole_(args.rows / kTile * kTile) {
    scratch.take(rest_, whole_ < args.rows ? kTile * args.size_in : 0);
  }
  // What one of some threads has to copy, before any of them asks for tiles.
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
  // Rows `first` and on; `first` is a multiple of kTile.
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

// A float is the sum of three bfloat16, its 24 bits eight by eight, so that their products with a
// weight of bfloat16 are exact: three products of tiles, at 16 times the rate of multiply-adds or
// so. Parts that would be subnormal are lost, and a weight that is infinite gives NaN.
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

  // Rows `first` and on, inputs k * 2 * kTile and on; zeros behind the last row.
  void split(int64_t first, int64_t k) {
    BFloat16* to = tiles_ + (first / kTile * steps_ + k) * kParts * kTilePairs;
    const auto* from = static_cast<const float*>(args_.input) + first * args_.input_row;
    for (int64_t i = 0; i < kTile; ++i, from += args_.input_row)
      for (int64_t j = 0; j < 2 * kTile; j += kLanes, to += kLanes) {
        Floats rest = first + i < args_.rows ? load(from + k * 2 * kTile + j) : Floats{};
        for (int part = 0; part < kParts; ++part) {
          const Floats upper = bits_as<Floats>(bits_as<Ints>(rest) & all(int32_t(0xffff0000)));
          put_upper(upper, to + part * kTilePairs);
          // Of what is infinite nothing is left; NaN stays, whose upper half may look infinite.
          rest = either(rest == upper, Floats{}, rest - upper);
        }
      }
  }

  static CA_INLINE void put_upper(Floats v, BFloat16* to) {
    const Words upper = __builtin_convertvector(bits_as<Ints>(v) >> 16, Words);
    std::memcpy(static_cast<void*>(to), &upper, sizeof upper);
  }

  const PackedLinearArgs& args_;
  int64_t steps_;  // tiles side by side
  BFloat16* tiles_;
};

}  // namespace compiled_attn

#endif
