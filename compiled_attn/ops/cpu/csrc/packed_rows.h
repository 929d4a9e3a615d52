// Rows of a packed weight: an embedding that a head shares.
#pragma once

#include <cstdint>
#include <cstring>

namespace compiled_attn {

constexpr int64_t kRowsOfPanel = 16;

// Copies row `id` of a weight of `groups` of inputs that lie together, each of `size` bytes.
template <int size>
void copy_packed_row(const char* weight, int64_t groups, int64_t id, char* out) {
  const char* from =
      weight + (id / kRowsOfPanel * groups * kRowsOfPanel + id % kRowsOfPanel) * size;
  for (int64_t k = 0; k < groups; ++k, from += kRowsOfPanel * size, out += size)
    std::memcpy(out, from, size);
}

// The same of pairs of upper halves of floats, which become these.
inline void widen_packed_row(const char* weight, int64_t groups, int64_t id, char* out) {
  constexpr int64_t kPair = 2 * sizeof(uint16_t);
  const char* from =
      weight + (id / kRowsOfPanel * groups * kRowsOfPanel + id % kRowsOfPanel) * kPair;
  for (int64_t k = 0; k < groups; ++k, from += kRowsOfPanel * kPair, out += 2 * kPair) {
    uint16_t halves[2];
    std::memcpy(halves, from, kPair);
    const uint32_t wide[] = {uint32_t{halves[0]} << 16, uint32_t{halves[1]} << 16};
    std::memcpy(out, wide, sizeof wide);
  }
}

// Whether all ids are rows of the weight; if not, `bad` is the first that is none.
inline bool are_rows(const int64_t* ids, int64_t count, int64_t rows, int64_t& bad) {
  for (int64_t i = 0; i < count; ++i)
    if (ids[i] < 0 || ids[i] >= rows) return bad = ids[i], false;
  return true;
}

// Rows of a weight [panels, groups, kRowsOfPanel, ...] with `bytes` that lie together.
struct PackedRowsArgs {
  const void* weight;
  const int64_t* ids;  // [count]
  void* out;           // [count, row]
  int64_t count, panels, groups, bytes;
  int64_t is_halves;
};

// False, with an id that is no row, and nothing is written.
inline bool take_packed_rows(const PackedRowsArgs& args, int64_t& bad) {
  if (!are_rows(args.ids, args.count, args.panels * kRowsOfPanel, bad)) return false;
  const int64_t row = args.groups * args.bytes * (args.is_halves ? 2 : 1);
  const auto copy = args.is_halves    ? widen_packed_row
                    : args.bytes == 4 ? copy_packed_row<4>
                                      : copy_packed_row<2>;
  auto* to = static_cast<char*>(args.out);
  for (int64_t i = 0; i < args.count; ++i, to += row)
    copy(static_cast<const char*>(args.weight), args.groups, args.ids[i], to);
  return true;
}

}  // namespace compiled_attn
