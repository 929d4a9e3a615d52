// A request of a step: its rows, what they see, where its keys and values are; and parts of it,
// the units of work of threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <utility>
#include <vector>

#include "abi.h"
#include "vector/simd.h"

namespace compiled_attn {

// Checks in debug builds.
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
  int64_t first, rows, length;  // first query row, query rows, keys including this step's

  Request(const PagedAttentionArgs& a, int64_t index)
      : args(a),
        table(a.block_table + index * a.table_stride),
        first(a.query_start_loc[index]),
        rows(a.query_start_loc[index + 1] - first),
        length(a.seq_lens[index]) {}

  int64_t position(int64_t row) const { return length - rows + row; }

  // The keys [begin, end) that a row sees; may be empty.
  Span visible(int64_t row) const {
    if (!args.causal) return {0, length};
    const int64_t end = std::max<int64_t>(position(row) + 1, 0);
    const int64_t begin = args.window ? std::max<int64_t>(end - args.window, 0) : 0;
    return {begin, end};
  }
};

// Offsets of consecutive tokens of a request; entries after the last token repeat it, so all are
// readable.
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

// Copies scales of heads [begin, end) -> out [end - begin, Capacity].
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

// Some query rows of some KV heads of a request against some of its keys.
struct Part {
  int64_t request;
  int64_t kv_begin, kv_end;
  int64_t row_begin, row_end;  // row * group + head of the group
  Span keys;
  int64_t segment_keys;  // keys of a segment
  int64_t results;  // index of its first row in Results, or kNoMerge

  static constexpr int64_t kNoMerge = -1;

  // Whether `keys` are all keys that its rows see.
  bool covers_all_keys() const { return results == kNoMerge; }
  int64_t rows() const { return (kv_end - kv_begin) * (row_end - row_begin); }

  // Whether a row does not see all of some keys; group: query heads of a KV head.
  bool is_partly_masked(Span some, const Request& step, int64_t group) const {
    return step.visible(row_begin / group).end < some.end ||
           step.visible((row_end - 1) / group).begin > some.begin;
  }

  // Segments of keys; they begin at the same keys however the request is split.
  int64_t segments() const {
    return std::max<int64_t>((keys.end - keys.begin + segment_keys - 1) / segment_keys, 1);
  }
  Span segment(int64_t s) const {
    const int64_t begin = keys.begin + s * segment_keys;
    return {begin, std::min(begin + segment_keys, keys.end)};
  }
};

// The queue of parts, as one thread uses it.
class PartQueue {
 public:
  PartQueue(const std::vector<Part>& parts, std::atomic<size_t>& next, int threads)
      : parts_(parts), next_(next), threads_(threads) {}

  // Returns the next part, or null.
  const Part* pop() { return peeked_ ? std::exchange(peeked_, nullptr) : at(next_++); }

  // Returns what `pop` will return, if enough is left for the other threads; or null.
  const Part* peek() {
    if (!peeked_ && next_ + threads_ <= parts_.size()) peeked_ = at(next_++);
    return peeked_;
  }

 private:
  const Part* at(size_t i) const { return i < parts_.size() ? &parts_[i] : nullptr; }

  const std::vector<Part>& parts_;
  std::atomic<size_t>& next_;
  size_t threads_;
  const Part* peeked_ = nullptr;
};

}  // namespace compiled_attn
