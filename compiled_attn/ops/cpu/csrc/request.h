// One request of a step: its rows, what they see, and where its keys and values lie.
#pragma once

#include <algorithm>
#include <cstdlib>

#include "abi.h"
#include "simd.h"

namespace compiled_attn {

// Checks of debug builds.
#if defined(COMPILED_ATTN_DEBUG)
#define CA_CHECK(holds) ((holds) ? void() : std::abort())
#else
#define CA_CHECK(holds) void()
#endif

struct Span {
  int64_t begin, end;
};

struct Request {
  const PagedAttentionArgs& args;
  const int32_t* table;
  int64_t first, rows, length;  // query rows, and keys with those of this step

  Request(const PagedAttentionArgs& a, int64_t index)
      : args(a),
        table(a.block_table + index * a.table_stride),
        first(a.query_start_loc[index]),
        rows(a.query_start_loc[index + 1] - first),
        length(a.seq_lens[index]) {}

  int64_t position(int64_t row) const { return length - rows + row; }

  // The keys that a row sees: [begin, end), empty where it sees none.
  Span seen(int64_t row) const {
    if (!args.causal) return {0, length};
    const int64_t end = std::max<int64_t>(position(row) + 1, 0);
    const int64_t begin = args.window ? std::max<int64_t>(end - args.window, 0) : 0;
    return {begin, end};
  }
};

// Offsets of some tokens in a row; what is beyond the last token repeats it, so that every entry
// may be read.
template <int Capacity>
struct Chunk {
  int64_t begin, count;
  int64_t key[Capacity], value[Capacity], key_scale[Capacity], value_scale[Capacity];

  void fill(const Request& request, int64_t from, int64_t to) {
    const PagedAttentionArgs& a = request.args;
    begin = from;
    count = std::clamp<int64_t>(to - from, 0, Capacity);
    if (!count) return;
    int64_t column = from / a.block_size, within = from % a.block_size;
    for (int64_t i = 0; i < Capacity; ++i) {
      const int64_t block = request.table[column];
      CA_CHECK(column < a.table_width && block >= 0 && block < a.num_blocks);
      key[i] = block * a.key_cache.block + within * a.key_cache.slot;
      value[i] = block * a.value_cache.block + within * a.value_cache.slot;
      if (a.key_scale.data) {
        key_scale[i] = block * a.key_scale.block + within * a.key_scale.slot;
        value_scale[i] = block * a.value_scale.block + within * a.value_scale.slot;
      }
      if (i + 1 < count && ++within == a.block_size) within = 0, ++column;
    }
  }
};

// Scales of the heads [begin, end) at some offsets: out [end - begin, Capacity].
template <int Capacity>
void gather(const Pages& scales, int64_t begin, int64_t end, const int64_t (&offsets)[Capacity],
            float* out) {
  static_assert(Capacity % 4 == 0, "four tokens at a time");
  const float* from = static_cast<const float*>(scales.data);
  for (int t = 0; t < Capacity; t += 4) {
    int64_t h = begin;
    if (scales.head == 1)
      for (; h + 4 <= end; h += 4) {
        Floats4 fours[4];
        for (int i = 0; i < 4; ++i) fours[i] = load_as<Floats4>(from + offsets[t + i] + h);
        transpose(fours);
        for (int i = 0; i < 4; ++i) store(out + (h - begin + i) * Capacity + t, fours[i]);
      }
    for (; h < end; ++h)
      for (int i = 0; i < 4; ++i)
        out[(h - begin) * Capacity + t + i] = from[offsets[t + i] + h * scales.head];
  }
}

}  // namespace compiled_attn
