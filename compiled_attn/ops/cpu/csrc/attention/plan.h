// Splits a step into parts.
//
// The results are bit-identical for any number of threads and any other requests in the step
// (except for which elements are NaN in a row that sees a NaN value): the split of a prefill
// depends on its request alone, and decode parts are whole segments of keys, merged in order.
#pragma once

#include <vector>

#include "attention/decode.h"
#include "attention/prefill_simd.h"
#include "attention/request.h"

namespace compiled_attn {

// Decode: bounds for the keys of a segment, and the number of segments between them.
constexpr int64_t kMinSegmentKeys = 256, kMaxSegmentKeys = 1024, kSegments = 8;
constexpr int64_t kPartsPerThread = 4;  // decode: enough for the threads to end together

constexpr int64_t kPrefillSplitKeys = 2048;  // prefill of a request with few tiles
constexpr int64_t kTargetTiles = 8;

// Consecutive parts that differ only in their keys; their results must be merged.
struct Group {
  int64_t first;   // part
  int64_t states;  // one per segment
};

struct Plan {
  std::vector<Part> parts;
  std::vector<Group> groups;
  int64_t rows = 0;  // to be merged

  // min_rows: rows of a KV head from which prefill kernels serve; target_bands: bands to cut a
  // request into
  Plan(const PagedAttentionArgs& args, int64_t min_rows, int64_t target_bands, int threads)
      : group_(args.heads / args.kv_heads), target_bands_(target_bands) {
    int64_t keys = 0;
    for (int64_t r = 0; r < args.requests; ++r)
      if (is_decode(args, r, min_rows)) keys += Request(args, r).length * blocks(args, r);
    decode_split_ = threads > 1 ? keys / (threads * kPartsPerThread) : INT64_MAX;
    for (int64_t r = 0; r < args.requests; ++r) {
      const Request request(args, r);
      if (args.segment)
        add_segments(request, r);
      else if (is_decode(args, r, min_rows))
        add_decode(request, r);
      else
        add_prefill(request, r);
    }
  }

  static bool is_decode(const PagedAttentionArgs& args, int64_t r, int64_t min_rows) {
    return args.segment || Request(args, r).rows * (args.heads / args.kv_heads) < min_rows;
  }

 private:
  // Blocks of rows of a request.
  static int64_t blocks(const PagedAttentionArgs& args, int64_t r) {
    const int64_t rows = Request(args, r).rows * (args.heads / args.kv_heads);
    return args.segment ? (rows + kMaxDecodeRows - 1) / kMaxDecodeRows : 1;
  }

  // Segments begin at multiples of their size, whatever rows a block has: keys that a row does not
  // see add zeros to it.
  void add_segments(const Request& request, int64_t r) {
    const int64_t segment = request.args.segment, rows = request.rows * group_;
    for (int64_t row = (blocks(request.args, r) - 1) * kMaxDecodeRows; row >= 0;
         row -= kMaxDecodeRows) {
      Part part{r,  0,       request.args.kv_heads, row, std::min(row + kMaxDecodeRows, rows),
                {}, segment, 0};
      set_keys(request, part);
      part.keys.begin -= part.keys.begin % segment;
      add(part, std::max(decode_split_ / segment, int64_t{1}) * segment);
    }
  }

  void add_decode(const Request& request, int64_t r) {
    if (!request.rows) return;
    Part part{r, 0, request.args.kv_heads, 0, request.rows * group_, {}, 0, 0};
    set_keys(request, part);
    const int64_t keys = part.keys.end - part.keys.begin;
    part.segment_keys =
        std::clamp(padded<kMinSegmentKeys>(keys / kSegments), kMinSegmentKeys, kMaxSegmentKeys);
    add(part, std::max(decode_split_ / part.segment_keys, int64_t{1}) * part.segment_keys);
  }

  void add_prefill(const Request& request, int64_t r) {
    const int64_t rows = request.rows * group_;
    const int64_t tiles = (rows + kTileRows - 1) / kTileRows * request.args.kv_heads;
    const int64_t split = tiles < kTargetTiles ? kPrefillSplitKeys : INT64_MAX;
    const int64_t band = std::clamp<int64_t>(tiles / target_bands_, 1, kBandTiles) * kTileRows;
    // Rows at the end see the most keys: starts with the longest parts.
    for (int64_t row = (rows - 1) / band * band; row >= 0; row -= band)
      for (int64_t h = 0; h < request.args.kv_heads; ++h) {
        Part part{r, h, h + 1, row, std::min(row + band, rows), {}, split, 0};
        set_keys(request, part);
        add(part, split);
      }
  }

  // Sets the keys that the part's rows see.
  void set_keys(const Request& request, Part& part) const {
    const int64_t end = request.visible((part.row_end - 1) / group_).end;
    part.keys = {std::min(request.visible(part.row_begin / group_).begin, end), end};
  }

  // Adds a part per `split` keys, in whole segments.
  void add(Part part, int64_t split) {
    const Span all = part.keys;
    part.results = Part::kNoMerge;
    if (all.end - all.begin <= split) return parts.push_back(part);
    groups.push_back({int64_t(parts.size()), part.segments()});
    for (int64_t begin = all.begin; begin < all.end; begin += split) {
      part.keys = {begin, std::min(begin + split, all.end)}, part.results = rows;
      rows += part.rows() * part.segments();
      parts.push_back(part);
    }
  }

  int64_t group_, target_bands_, decode_split_;
};

}  // namespace compiled_attn
