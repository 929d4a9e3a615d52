// What will be read soon: keys, then values, of chunk after chunk, and on into the next part.
#pragma once

#include <functional>

#include "part.h"
#include "prefetch.h"

namespace compiled_attn {

// Goes `most` rows (one head of one token) before what is read, at the pace of reading.
//
// A part that ends is no reason to stop: memory would rest until the next one begins.
template <int Capacity>
class Lookahead {
 public:
  // behind: the part after the one that was begun last, or null.
  Lookahead(const PagedAttentionArgs& args, int64_t element_bytes, int64_t most,
            std::function<const Part*()> behind)
      : args_(args), bytes_(element_bytes), most_(most), behind_(std::move(behind)) {}

  // A part begins: true where nothing of it was asked for.
  bool begin(const Part& part) {
    begun_ = &part;
    is_over_ = false;
    if (part_ == &part) return false;
    lead_ = 0;
    go_to(part);
    return true;
  }

  // So many rows are about to be read.
  void reading(int64_t rows) { lead_ -= rows; }

  // The rows to ask for where `count` are read.
  CA_INLINE Ahead rows(int64_t count) {
    const Ahead at{walk_.at(), args_.forms.asks_near != 0};
    if (lead_ < most_ && !is_over_) {
      lead_ += walk_.pass(count);
      if (walk_.is_over()) go_on();
    }
    return at;
  }

  // Rows of keys or values that can be asked for before anything else.
  int64_t at_once() const { return std::min(most_, walk_.left()); }

 private:
  void go_to(const Part& part) {
    part_ = &part;
    chunk_.fill(Request(args_, part.request), part.keys.begin, part.keys.end);
    is_over_ = !chunk_.count;
    walk_over(args_.key_cache, chunk_.key, false);
  }

  void go_on() {
    if (!of_values_) return walk_over(args_.value_cache, chunk_.value, true);
    chunk_.fill(Request(args_, part_->request), chunk_.begin + chunk_.count, part_->keys.end);
    if (chunk_.count) return walk_over(args_.key_cache, chunk_.key, false);
    const Part* behind = part_ == begun_ ? behind_() : nullptr;
    is_over_ = !behind;
    if (behind) go_to(*behind);
  }

  void walk_over(const Pages& pages, const int64_t* offsets, bool of_values) {
    of_values_ = of_values;
    walk_ = Walk(Stretch(pages, offsets, chunk_.count, args_.kv_heads, bytes_));
  }

  const PagedAttentionArgs& args_;
  int64_t bytes_, most_, lead_ = 0;
  std::function<const Part*()> behind_;
  const Part *part_ = nullptr, *begun_ = nullptr;
  Chunk<Capacity> chunk_;
  bool of_values_ = false, is_over_ = true;
  Walk walk_;
};

}  // namespace compiled_attn
