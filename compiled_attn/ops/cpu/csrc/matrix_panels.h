// Keys, values and queries in the order of tiles.
#pragma once

#include "elements.h"
#include "request.h"
#include "rows.h"
#include "spoilt.h"
#include "tile_registers.h"
#include "tiles.h"

namespace compiled_attn {

constexpr int kColumns = 2 * kTile;  // query rows, or keys, of two tiles

// Two rows of kTile elements as pairs.
CA_INLINE void zip_row(const BFloat16* a, const BFloat16* b, BFloat16* pairs) {
  for (int c = 0; c < kTile; c += kLanes) {
    const Ints both = widened(load_as<Words>(a + c)) | widened(load_as<Words>(b + c)) << 16;
    std::memcpy(pairs + 2 * c, &both, sizeof both);
  }
}

// kTile rows of kTile floats or pairs become columns.
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

// The elements of kColumns rows, with zeros behind up to `room`, or the rows themselves where they
// have that many.
class WholeRows {
 public:
  void take(Scratch& scratch, int64_t dim, int64_t room) {
    dim_ = dim, room_ = room;
    scratch.take(copies_, kColumns * room);
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

// The keys of a chunk: tiles of kTile keys, as they are in the cache.
class KeyPanel {
 public:
  void take(Scratch& scratch, const PagedAttentionArgs& args) {
    tiles_ = padded<kColumns>(args.head_dim) / kColumns;
    rows_.take(scratch, args.head_dim, tiles_ * kColumns);
    scratch.take(data_, kTileKeys / kTile * tiles_ * kTilePairs);
  }
  // Keys t * kTile and on, dims d * kColumns and on.
  CA_INLINE BFloat16* tile(int64_t t, int64_t d) const {
    return data_ + (t * tiles_ + d) * kTilePairs;
  }
  int64_t tiles() const { return tiles_; }

  void pack(const PagedAttentionArgs& args, int64_t h, const Chunk<kTileKeys>& chunk) {
    const auto* from = static_cast<const BFloat16*>(args.key_cache.data) + h * args.key_cache.head;
    for (int64_t t = 0; t < padded<kColumns>(chunk.count); ++t) {
      const BFloat16* row = rows_.whole(from + chunk.key[t], 0);
      for (int64_t d = 0; d < tiles_; ++d)
        std::memcpy(tile(t / kTile, d) + t % kTile * kColumns, row + d * kColumns,
                    kColumns * sizeof(BFloat16));
    }
  }

 private:
  int64_t tiles_;
  WholeRows rows_;
  BFloat16* data_;
};

// The values of a chunk: tiles of kTile dims, of pairs of keys.
class ValuePanel {
 public:
  void take(Scratch& scratch, const PagedAttentionArgs& args) {
    tiles_ = padded<kColumns>(args.value_dim) / kTile;
    rows_.take(scratch, args.value_dim, tiles_ * kTile);
    scratch.take(data_, kTileKeys / kColumns * tiles_ * kTilePairs);
  }
  // Dims d * kTile and on, keys t * kColumns and on.
  CA_INLINE BFloat16* tile(int64_t d, int64_t t) const {
    return data_ + (d * (kTileKeys / kColumns) + t) * kTilePairs;
  }
  int64_t tiles() const { return tiles_; }

  void pack(const PagedAttentionArgs& args, int64_t h, const Chunk<kTileKeys>& chunk,
            const Spoilt<BFloat16, kTileKeys>& spoilt) {
    const auto* from =
        static_cast<const BFloat16*>(args.value_cache.data) + h * args.value_cache.head;
    for (int64_t t = 0; t < padded<kColumns>(chunk.count); t += kColumns) {
      const BFloat16* rows[kColumns];
      for (int i = 0; i < kColumns; ++i)
        rows[i] = rows_.whole(spoilt.value(from + chunk.value[t + i], 0, t + i), i);
      for (int64_t d = 0; d < tiles_; ++d) {
        alignas(64) BFloat16 pairs[kTilePairs];
        for (int i = 0; i < kTile; ++i)
          zip_row(rows[2 * i] + d * kTile, rows[2 * i + 1] + d * kTile, pairs + i * kColumns);
        transpose_tile([&](int i) { return pairs + i * kColumns; }, tile(d, t / kColumns));
      }
    }
  }

 private:
  int64_t tiles_;
  WholeRows rows_;
  BFloat16* data_;
};

}  // namespace compiled_attn
