// Packs keys, values and queries into tiles.
#pragma once

#include "attention/prefill.h"
#include "vector/amx.h"
#include "vector/elements.h"

namespace compiled_attn {

constexpr int kTwoTiles = 2 * kTile;  // query rows, or keys

// Zips two rows of kTile elements to pairs.
CA_INLINE void zip_row(const BFloat16* a, const BFloat16* b, BFloat16* pairs) {
  for (int c = 0; c < kTile; c += kLanes) {
    const Ints both = widen(load_as<U16s>(a + c)) | widen(load_as<U16s>(b + c)) << 16;
    std::memcpy(pairs + 2 * c, &both, sizeof both);
  }
}

// Transposes kTile rows of kTile floats or pairs.
template <class Row, class Element>
CA_INLINE void transpose_tile(const Row& row, Element* to) {
  if constexpr (kLanes == kTile) {
    Floats rows[kLanes];
    for (int i = 0; i < kTile; ++i) rows[i] = load_as<Floats>(row(i));
    transpose(rows);
    for (int i = 0; i < kTile; ++i)
      std::memcpy(reinterpret_cast<float*>(to) + i * kTile, &rows[i], sizeof(Floats));
  } else {
    for (int i = 0; i < kTile; ++i)
      for (int j = 0; j < kTile; ++j)
        std::memcpy(reinterpret_cast<float*>(to) + j * kTile + i,
                    reinterpret_cast<const float*>(row(i)) + j, sizeof(float));
  }
}

// Zero-pads rows to `room` elements; rows that have that many are used in place.
class PaddedRows {
 public:
  void take(Scratch& scratch, int64_t dim, int64_t room) {
    dim_ = dim, room_ = room;
    scratch.take(copies_, kTwoTiles * room);
  }
  CA_INLINE const BFloat16* whole(const BFloat16* row, int i) const {
    if (dim_ == room_) return row;
    BFloat16* copy = copies_ + i * room_;
    std::memcpy(copy, row, dim_ * sizeof(BFloat16));
    std::memset(copy + dim_, 0, (room_ - dim_) * sizeof(BFloat16));
    return copy;
  }

 private:
  int64_t dim_, room_;
  BFloat16* copies_;
};

// The keys of a chunk as tiles [kTile keys, kTwoTiles dims].
class KeyPanel {
 public:
  void take(Scratch& scratch, const PagedAttentionArgs& args) {
    tiles_ = padded<kTwoTiles>(args.head_dim) / kTwoTiles;
    rows_.take(scratch, args.head_dim, tiles_ * kTwoTiles);
    scratch.take(data_, kTileKeys / kTile * tiles_ * kTilePairs);
  }
  // The tile of the keys from t * kTile on, and the dims from d * kTwoTiles on.
  CA_INLINE BFloat16* tile(int64_t t, int64_t d) const {
    return data_ + (t * tiles_ + d) * kTilePairs;
  }
  int64_t tiles() const { return tiles_; }

  void pack(const BFloat16* from, const Chunk<kTileKeys>& chunk) {
    for (int64_t t = 0; t < padded<kTwoTiles>(chunk.count); ++t) {
      const BFloat16* row = rows_.whole(from + chunk.key[t], 0);
      for (int64_t d = 0; d < tiles_; ++d)
        std::memcpy(tile(t / kTile, d) + t % kTile * kTwoTiles, row + d * kTwoTiles,
                    kTwoTiles * sizeof(BFloat16));
    }
  }

 private:
  int64_t tiles_;
  PaddedRows rows_;
  BFloat16* data_;
};

// The values of a chunk as tiles [kTile dims, kTile pairs of keys].
class ValuePanel {
 public:
  static int64_t tiles(const PagedAttentionArgs& args) {
    return padded<kTwoTiles>(args.value_dim) / kTile;
  }

  void take(Scratch& scratch, const PagedAttentionArgs& args) {
    tiles_ = tiles(args);
    rows_.take(scratch, args.value_dim, tiles_ * kTile);
    scratch.take(data_, kTileKeys / kTwoTiles * tiles_ * kTilePairs);
  }
  // The tile of the dims from d * kTile on, and the keys from t * kTwoTiles on.
  CA_INLINE BFloat16* tile(int64_t d, int64_t t) const {
    return data_ + (d * (kTileKeys / kTwoTiles) + t) * kTilePairs;
  }
  int64_t tiles() const { return tiles_; }

  void pack(const BFloat16* from, const Chunk<kTileKeys>& chunk,
            const NonFiniteGuard<BFloat16, kTileKeys>& guard) {
    for (int64_t t = 0; t < padded<kTwoTiles>(chunk.count); t += kTwoTiles) {
      const BFloat16* rows[kTwoTiles];
      for (int i = 0; i < kTwoTiles; ++i)
        rows[i] = rows_.whole(guard.value(from + chunk.value[t + i], 0, t + i), i);
      for (int64_t d = 0; d < tiles_; ++d) {
        alignas(64) BFloat16 pairs[kTilePairs];
        for (int i = 0; i < kTile; ++i)
          zip_row(rows[2 * i] + d * kTile, rows[2 * i + 1] + d * kTile, pairs + i * kTwoTiles);
        transpose_tile([&](int i) { return pairs + i * kTwoTiles; }, tile(d, t / kTwoTiles));
      }
    }
  }

 private:
  int64_t tiles_;
  PaddedRows rows_;
  BFloat16* data_;
};

}  // namespace compiled_attn
