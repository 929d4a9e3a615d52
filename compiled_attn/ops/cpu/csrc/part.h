// A part of a step's work.
#pragma once

#include <atomic>
#include <utility>
#include <vector>

#include "request.h"
#include "scores.h"

namespace compiled_attn {

// Some rows of some KV heads of a request against some of its keys.
struct Part {
  int64_t request;
  int64_t kv_begin, kv_end;
  int64_t row_begin, row_end;  // of each KV head's group, folded: row * group + head
  Span keys;
  int64_t of_segment;  // keys
  int64_t results;  // where its first row stands in the results, kAlone: nowhere

  static constexpr int64_t kAlone = -1;

  // Whether these are all keys that its rows see.
  bool is_alone() const { return results == kAlone; }
  int64_t rows() const { return (kv_end - kv_begin) * (row_end - row_begin); }

  // Whether some of its rows do not see some of these keys; group: rows of a token.
  bool hides(Span some, const Request& step, int64_t group) const {
    return step.seen(row_begin / group).end < some.end ||
           step.seen((row_end - 1) / group).begin > some.begin;
  }

  // Its keys, in steps that begin at the same places however a request is cut.
  int64_t segments() const {
    return std::max<int64_t>((keys.end - keys.begin + of_segment - 1) / of_segment, 1);
  }
  Span segment(int64_t s) const {
    const int64_t begin = keys.begin + s * of_segment;
    return {begin, std::min(begin + of_segment, keys.end)};
  }
};

// The parts of a step as one of its threads takes them.
class PartsOfThread {
 public:
  PartsOfThread(const std::vector<Part>& parts, std::atomic<size_t>& next, int threads)
      : parts_(parts), next_(next), threads_(threads) {}

  // The next part, or null.
  const Part* take() { return held_ ? std::exchange(held_, nullptr) : at(next_++); }

  // What `take` will give, where that leaves something for other threads; or null.
  const Part* behind() {
    if (!held_ && next_ + threads_ <= parts_.size()) held_ = at(next_++);
    return held_;
  }

 private:
  const Part* at(size_t i) const { return i < parts_.size() ? &parts_[i] : nullptr; }

  const std::vector<Part>& parts_;
  std::atomic<size_t>& next_;
  size_t threads_;
  const Part* held_ = nullptr;
};

}  // namespace compiled_attn
