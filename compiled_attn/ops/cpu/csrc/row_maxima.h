// The largest logit of a row, and those of its chunks, in one pass.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "elements.h"
#include "scratch.h"

namespace compiled_attn {

// A row of logits in vectors, the last of which is filled up with minus infinity; and the row that is
// read after it.
template <class Element>
class LogitRow {
 public:
  LogitRow(const Element* data, int64_t size, const Element* next)
      : data_(data), next_(next), size_(size) {
    const int64_t rest = size - whole() * kLanes;
    to_floats(data + whole() * kLanes, rest, rest_);
    std::fill(rest_ + rest, rest_ + kLanes, -INFINITY);
  }

  int64_t size() const { return size_; }
  int64_t whole() const { return size_ / kLanes; }
  int64_t vectors() const { return (size_ + kLanes - 1) / kLanes; }
  CA_INLINE Floats whole_vector(int64_t at) const { return load(data_ + at * kLanes); }
  CA_INLINE Floats vector_again(int64_t at) const {  // time to fetch one of the next row
    __builtin_prefetch(next_ + at * kLanes, 0, 2);
    return whole_vector(at);
  }
  Floats vector(int64_t at) const { return at < whole() ? whole_vector(at) : load(rest_); }

 private:
  const Element *data_, *next_;
  int64_t size_;
  float rest_[kLanes];
};

class RowMaxima {
 public:
  static constexpr int64_t kVectors = 32;  // of a group; a chunk is a lane of these
  static constexpr int64_t kFewGroups = 16;
  static int64_t groups(int64_t size) { return size / (kVectors * kLanes); }

  RowMaxima(int64_t vocab, Scratch& scratch) {
    scratch.take(maxima_, groups(vocab) * kLanes);
    scratch.take(sample_, groups(vocab));
  }

  // The largest logit; NaN where the row has one.
  template <class Element>
  float find(const LogitRow<Element>& row) {
    groups_ = groups(row.size());
    Floats best = all(-INFINITY);
    Ints is_nan{};
    for (int64_t g = 0; g < groups_; ++g) {
      Floats some[4] = {all(-INFINITY), all(-INFINITY), all(-INFINITY), all(-INFINITY)};
      for (int64_t at = g * kVectors; at < (g + 1) * kVectors; at += 4) {
        for (int i = 0; i < 4; ++i) {
          const Floats v = row.whole_vector(at + i);
          is_nan |= v != v;
          some[i] = larger(v, some[i]);
        }
      }
      const Floats group = larger(larger(some[0], some[1]), larger(some[2], some[3]));
      store(maxima_ + g * kLanes, group);
      best = larger(group, best);
    }
    for (int64_t at = groups_ * kVectors; at < row.vectors(); ++at) {
      const Floats v = row.vector(at);
      is_nan |= v != v;
      best = larger(v, best);
    }
    largest_ = -INFINITY;
    for (int i = 0; i < kLanes; ++i) {
      if (is_nan[i]) return NAN;
      largest_ = std::max(largest_, best[i]);
    }
    return largest_;
  }

  // The first token of the largest logit, which is finite.
  template <class Element>
  int64_t first(const LogitRow<Element>& row) const {
    int64_t g = 0;
    while (g < groups_ && !has_largest(load(maxima_ + g * kLanes))) ++g;
    int64_t at = g * kVectors;
    while (!has_largest(row.vector(at))) ++at;
    const Floats v = row.vector(at);
    int lane = 0;
    while (v[lane] != largest_) ++lane;
    return at * kLanes + lane;
  }

  // The least of about `wanted` largest logits, guessed from a chunk of each group; the least of
  // all floats where a row has few groups.
  float least_of(int64_t wanted, int64_t size) const {
    if (groups_ < kFewGroups) return std::numeric_limits<float>::lowest();
    for (int64_t g = 0; g < groups_; ++g) sample_[g] = maxima_[g * kLanes + g % kLanes];
    const double chunks = 1 - std::pow(1 - std::min(1.0, double(wanted) / size), double(kVectors));
    const int64_t rank = std::min(groups_ - 1, int64_t(chunks * groups_));
    std::nth_element(sample_, sample_ + rank, sample_ + groups_, std::greater<float>());
    return sample_[rank];
  }

 private:
  bool has_largest(Floats v) const {
    for (int i = 0; i < kLanes; ++i)
      if (v[i] == largest_) return true;
    return false;
  }

  float *maxima_, *sample_;
  int64_t groups_ = 0;
  float largest_ = 0;
};

}  // namespace compiled_attn
