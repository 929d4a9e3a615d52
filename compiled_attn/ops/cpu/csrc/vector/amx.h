// The eight AMX tile registers, and an emulation in plain C++.
//
// A tile is 16 rows of 64 bytes, unless its `TileShape` is smaller: 16 x 16 floats or int32, pairs of
// bfloat16, or quads of bytes. Both implementations give the same bits, so machines without AMX can
// test the kernels.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "vector/elements.h"

#if defined(__AMX_TILE__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace compiled_attn {

constexpr int kTile = 16;  // rows, and floats or pairs per row
constexpr int64_t kTileFloats = kTile * kTile;
constexpr int64_t kTilePairs = 2 * kTileFloats;  // elements of bfloat16

struct TileShape {
  uint8_t rows = kTile, bytes = 4 * kTile;  // bytes: of a row
};
struct TileShapes {
  TileShape of[8];
};

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && !defined(COMPILED_ATTN_PLAIN_TILES)
#define CA_HAS_TILES 1

// Linux grants the registers on request: arch_prctl(ARCH_REQ_XCOMP_PERM, tile data). Python
// requests them before loading this library, and falls back to another if refused.
inline void ask_for_tiles() {
  static const long answer = syscall(SYS_arch_prctl, 0x1023, 18);
  (void)answer;
}

// GCC's intrinsics do not declare that they read memory, so stores could move past them.
class TileRegisters {
 public:
  explicit TileRegisters(const TileShapes& shapes = {}) {
    ask_for_tiles();
    alignas(64) struct {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int tile = 0; tile < 8; ++tile) {
      config.row_bytes[tile] = shapes.of[tile].bytes;
      config.rows[tile] = shapes.of[tile].rows;
    }
    asm volatile("ldtilecfg %0" ::"m"(config));
  }
  ~TileRegisters() { asm volatile("tilerelease"); }
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;

  template <int tile>
  CA_INLINE void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(tile));
  }
  // stride: bytes between rows
  template <int tile>
  CA_INLINE void load(const void* at, int64_t stride = 64) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(tile), "r"(at), "r"(stride) : "memory");
  }
  template <int tile>
  CA_INLINE void store(void* at) {
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(tile), "r"(at), "r"(int64_t{64})
                 : "memory");
  }
  // sum[m][n] += a[m][k] * b[k][n] over the pairs k
  template <int sum, int a, int b>
  CA_INLINE void multiply_add() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sum), "i"(a), "i"(b));
  }
  // The same over quads of bytes, signed in a and unsigned in b, in int32.
  template <int sum, int a, int b>
  CA_INLINE void multiply_add_bytes() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sum), "i"(a), "i"(b));
  }
};

#elif defined(COMPILED_ATTN_PLAIN_TILES)
#define CA_HAS_TILES 1

class TileRegisters {
 public:
  explicit TileRegisters(const TileShapes& shapes = {}) : shapes_(shapes) {}

  template <int tile>
  void zero() {
    std::memset(tiles_[tile], 0, sizeof tiles_[tile]);
  }
  template <int tile>
  void load(const void* at, int64_t stride = 64) {
    for (int row = 0; row < shapes_.of[tile].rows; ++row)
      std::memcpy(tiles_[tile][row], static_cast<const char*>(at) + row * stride,
                  shapes_.of[tile].bytes);
  }
  template <int tile>
  void store(void* at) const {
    std::memcpy(at, tiles_[tile], sizeof tiles_[tile]);
  }

  // Same order and rounding as the instruction: sums first and second elements of the pairs
  // separately; flushes subnormals in inputs and results.
  template <int sum, int a, int b>
  void multiply_add() {
    for (int m = 0; m < kTile; ++m) {
      float first[kTile] = {}, second[kTile] = {};
      for (int k = 0; k < kTile; ++k) {
        const float a_first = low(tiles_[a][m][k]), a_second = high(tiles_[a][m][k]);
        for (int n = 0; n < kTile; ++n) {
          first[n] = flushed(std::fma(a_first, low(tiles_[b][k][n]), first[n]));
          second[n] = flushed(std::fma(a_second, high(tiles_[b][k][n]), second[n]));
        }
      }
      for (int n = 0; n < kTile; ++n) {
        const float before = flushed(bit_cast<float>(tiles_[sum][m][n]));
        const float more = flushed(first[n] + second[n]);
        tiles_[sum][m][n] = float_bits(flushed(before + more));
      }
    }
  }

  template <int sum, int a, int b>
  void multiply_add_bytes() {
    for (int m = 0; m < kTile; ++m)
      for (int k = 0; k < shapes_.of[b].rows; ++k)
        for (int n = 0; n < kTile; ++n)
          for (int byte = 0; byte < 32; byte += 8)
            tiles_[sum][m][n] += uint32_t(int8_t(tiles_[a][m][k] >> byte)) *
                                 (tiles_[b][k][n] >> byte & 0xff);
  }

 private:
  static float flushed(float x) {
    return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x;  // NaN stays
  }
  static float low(uint32_t pair) { return flushed(bit_cast<float>(pair << 16)); }
  static float high(uint32_t pair) { return flushed(bit_cast<float>(pair & 0xffff0000u)); }

  TileShapes shapes_;
  uint32_t tiles_[8][kTile][kTile];
};

#else
#define CA_HAS_TILES 0
#endif

}  // namespace compiled_attn
