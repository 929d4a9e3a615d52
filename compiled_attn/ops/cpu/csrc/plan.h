// A step cut into parts that threads take one by one.
//
// How a request is cut depends on the request alone, and the merge follows the order of the keys:
// so results are the same, bit for bit, for any number of threads and whatever else is in the step.
#pragma once

#include <vector>

#include "few_rows.h"
#include "part.h"
#include "tiles.h"

namespace compiled_attn {

constexpr int64_t kKeysOfSplit = 1024;      // few rows: enough to be worth a start
constexpr int64_t kKeysOfTileSplit = 2048;  // tiles, where a request has few of them
constexpr int64_t kEnoughTiles = 8;

// Parts that differ in their keys only, in order, to be merged.
struct Group {
  int64_t first, count;
};

struct Plan {
  std::vector<Part> parts;
  std::vector<Group> groups;
  int64_t rows = 0;  // of the results to be merged

  // least: rows of a KV head that are many; enough: bands of a request that each pack its keys.
  Plan(const PagedAttentionArgs& args, int64_t least, int64_t enough)
      : group_(args.heads / args.kv_heads), enough_(enough) {
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
    add(request, {r, 0, request.args.kv_heads, 0, request.rows * group_, {}, 0}, kKeysOfSplit);
  }

  void tiled(const Request& request, int64_t r) {
    const int64_t rows = request.rows * group_;
    const int64_t tiles = (rows + kTileRows - 1) / kTileRows * request.args.kv_heads;
    const int64_t split = tiles < kEnoughTiles ? kKeysOfTileSplit : INT64_MAX;
    const int64_t band = std::clamp<int64_t>(tiles / enough_, 1, kTilesOfBand) * kTileRows;
    // The last rows see most: what takes longest is taken first.
    for (int64_t row = (rows - 1) / band * band; row >= 0; row -= band)
      for (int64_t h = 0; h < request.args.kv_heads; ++h)
        add(request, {r, h, h + 1, row, std::min(row + band, rows), {}, 0}, split);
  }

  void add(const Request& request, Part part, int64_t split) {
    const int64_t end = request.seen((part.row_end - 1) / group_).end;
    int64_t begin = std::min(request.seen(part.row_begin / group_).begin, end);
    if (end - begin <= split) {
      part.keys = {begin, end}, part.results = Part::kAlone;
      parts.push_back(part);
      return;
    }
    groups.push_back({int64_t(parts.size()), (end - begin + split - 1) / split});
    for (; begin < end; begin += split) {
      part.keys = {begin, std::min(begin + split, end)}, part.results = rows;
      rows += part.rows();
      parts.push_back(part);
    }
  }

  int64_t group_, enough_;
};

}  // namespace compiled_attn
