// A step cut into parts that threads take one by one.
//
// Results are the same, bit for bit, for any number of threads and whatever else is in the step (but
// for how many elements are NaN of a row that sees a value with one): where rows are many, how a
// request is cut depends on the request alone; where they are few, parts are whole segments of its
// keys, which are folded in order, within a part or behind all of them.
#pragma once

#include <vector>

#include "few_rows.h"
#include "part.h"
#include "tiles.h"

namespace compiled_attn {

// Few rows: the fewest keys to begin anew for, the most to be without a state of their own, and
// how many segments to have between the two.
constexpr int64_t kLeastKeys = 256, kMostKeys = 1024, kSegments = 8;
constexpr int64_t kPartsOfThread = 4;  // few rows: enough for threads to end together

constexpr int64_t kKeysOfTileSplit = 2048;  // tiles, where a request has few of them
constexpr int64_t kEnoughTiles = 8;

// Parts that differ in their keys only, in order; what they leave behind is to be merged.
struct Group {
  int64_t first;   // part
  int64_t states;  // of a segment each
};

struct Plan {
  std::vector<Part> parts;
  std::vector<Group> groups;
  int64_t rows = 0;  // of the results to be merged

  // least: rows of a KV head that are many; enough: bands of a request that each pack its keys.
  Plan(const PagedAttentionArgs& args, int64_t least, int64_t enough, int threads)
      : group_(args.heads / args.kv_heads), enough_(enough) {
    int64_t keys = 0;
    for (int64_t r = 0; r < args.requests; ++r)
      if (is_few(args, r, least)) keys += Request(args, r).length;
    few_split_ = threads > 1 ? keys / (threads * kPartsOfThread) : INT64_MAX;
    for (int64_t r = 0; r < args.requests; ++r) {
      const Request request(args, r);
      if (is_few(args, r, least))
        few(request, r);
      else
        tiled(request, r);
    }
  }

  static bool is_few(const PagedAttentionArgs& args, int64_t r, int64_t least) {
    return Request(args, r).rows * (args.heads / args.kv_heads) < least;
  }

 private:
  void few(const Request& request, int64_t r) {
    if (!request.rows) return;
    Part all{r, 0, request.args.kv_heads, 0, request.rows * group_, {}, 0, 0};
    see(request, all);
    const int64_t keys = all.keys.end - all.keys.begin;
    all.of_segment = std::clamp(padded<kLeastKeys>(keys / kSegments), kLeastKeys, kMostKeys);
    add(all, std::max(few_split_ / all.of_segment, int64_t{1}) * all.of_segment);
  }

  void tiled(const Request& request, int64_t r) {
    const int64_t rows = request.rows * group_;
    const int64_t tiles = (rows + kTileRows - 1) / kTileRows * request.args.kv_heads;
    const int64_t split = tiles < kEnoughTiles ? kKeysOfTileSplit : INT64_MAX;
    const int64_t band = std::clamp<int64_t>(tiles / enough_, 1, kTilesOfBand) * kTileRows;
    // The last rows see most: what takes longest is taken first.
    for (int64_t row = (rows - 1) / band * band; row >= 0; row -= band)
      for (int64_t h = 0; h < request.args.kv_heads; ++h) {
        Part part{r, h, h + 1, row, std::min(row + band, rows), {}, split, 0};
        see(request, part);
        add(part, split);
      }
  }

  // All keys that the part's rows see.
  void see(const Request& request, Part& part) const {
    const int64_t end = request.seen((part.row_end - 1) / group_).end;
    part.keys = {std::min(request.seen(part.row_begin / group_).begin, end), end};
  }

  // A part for each `split` keys, whole segments.
  void add(Part part, int64_t split) {
    const Span all = part.keys;
    part.results = Part::kAlone;
    if (all.end - all.begin <= split) return parts.push_back(part);
    groups.push_back({int64_t(parts.size()), part.segments()});
    for (int64_t begin = all.begin; begin < all.end; begin += split) {
      part.keys = {begin, std::min(begin + split, all.end)}, part.results = rows;
      rows += part.rows() * part.segments();
      parts.push_back(part);
    }
  }

  int64_t group_, enough_, few_split_;
};

}  // namespace compiled_attn
