// The base of both prefill kernels: passes over the keys of a part, and the second pass that keeps
// NaN and infinite values away from rows that do not see them.
#pragma once

#include "attention/nonfinite_guard.h"
#include "attention/prefetch.h"
#include "attention/rows.h"

namespace compiled_attn {

constexpr int kTileRows = 192;
constexpr int kTileKeys = 256;
constexpr int kBandTiles = 8;
constexpr int kBandRows = kBandTiles * kTileRows;

// A kernel derives from PrefillBase<Kernel, Element> and provides:
//   kRowStep                 query rows are padded to this
//   prepare(part, request)   packs the queries
//   attend_chunk(part)       adds the values of `chunk_`, weighted, to `sums_`
//   write(part, results)     writes the finished rows
template <class Kernel, class Element_>
class PrefillBase {
 public:
  using Element = Element_;

  // How many bands to cut a request into; each packs its keys again. With a window, the first key
  // of a band, and so its bits, depend on the band: the number must not depend on the threads.
  static int64_t target_bands(const PagedAttentionArgs& args, int threads) {
    return threads == 1 && !args.window ? 1 : 8;
  }

  void run(const Part& part, const Results& results) {
    const Request request(args_, part.request);
    guard_.active = false;
    accumulate(part, request);
    if (part.is_partly_masked(part.keys, request, group_) &&
        !all_finite(sums_, padded<Kernel::kRowStep>(count_) * value_dim_)) {
      guard_.active = true;
      accumulate(part, request);
    }
    kernel().write(part, results);
  }

 protected:
  PrefillBase(const PagedAttentionArgs& args, int64_t value_dim)
      : args_(args), group_(args.heads / args.kv_heads), value_dim_(value_dim) {
    scratch_.take(sums_, kBandRows * value_dim_);
    guard_.take(scratch_, 1, value_dim_);
  }

  // The rows of a KV head in a cache.
  const Element* head_of(const Pages& pages, int64_t h) const {
    return static_cast<const Element*>(pages.data) + h * pages.head;
  }

  const PagedAttentionArgs& args_;
  Scratch scratch_;
  int64_t group_, value_dim_, count_ = 0;  // value_dim_: padded; count_: query rows of the part
  float* sums_;
  Chunk<kTileKeys> chunk_;
  NextChunk<Element, kTileKeys> next_;
  NonFiniteGuard<Element, kTileKeys> guard_;

 private:
  Kernel& kernel() { return static_cast<Kernel&>(*this); }

  void accumulate(const Part& part, const Request& request) {
    count_ = part.row_end - part.row_begin;
    kernel().prepare(part, request);
    std::fill_n(sums_, padded<Kernel::kRowStep>(count_) * value_dim_, 0.0f);
    next_.fill(request, part.keys.begin, part.keys.end);
    while (next_.chunk().count > 0) {
      chunk_ = next_.chunk();
      next_.fill(request, chunk_.begin + chunk_.count, part.keys.end);
      guard_.find(args_, part.kv_begin, part.kv_end, chunk_);
      kernel().attend_chunk(part);
    }
  }
};

}  // namespace compiled_attn
