// Products of bytes in AMX tiles.
#pragma once

#include "linear/pieces.h"
#include "vector/amx.h"

#if CA_HAS_TILES

namespace compiled_attn {

// Multiplies kTile rows of int8 by the unpacked codes of a group of 16 or 32 inputs of a panel.
class ByteTiles {
 public:
  alignas(64) int32_t sums[2][kTileFloats];

  ByteTiles() : tiles_(shapes()) {}

  // Writes sums[to] = inputs x codes; stride: bytes between rows of inputs.
  template <int group>
  CA_INLINE void multiply(int64_t to, const int8_t* inputs, int64_t stride, const uint8_t* codes) {
    constexpr int a = group == 16 ? 2 : 4;
    tiles_.zero<0>();
    tiles_.load<a>(inputs, stride), tiles_.load<a + 1>(codes);
    tiles_.multiply_add_bytes<0, a, a + 1>();
    tiles_.store<0>(sums[to]);
  }

 private:
  static TileShapes shapes() {
    TileShapes shapes;
    shapes.of[2].bytes = 16, shapes.of[3].rows = 4;
    shapes.of[4].bytes = kCodeBlock, shapes.of[5].rows = kCodeBlock / 4;
    return shapes;
  }

  TileRegisters tiles_;
};

}  // namespace compiled_attn

#endif
