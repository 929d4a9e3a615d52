// A row of logits: its largest logits, and the sum of the weights of the others.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "scratch.h"
#include "vector/elements.h"
#include "vector/vmath.h"

namespace compiled_attn {

// A row of logits as vectors, the last one padded with -inf; also knows the row read next.
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
  CA_INLINE Floats vector_again(int64_t at) const {  // prefetches the next row
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
  static constexpr int64_t kVectors = 32;  // per group; a chunk is one lane of these
  static constexpr int64_t kMinGroups = 16;
  static int64_t groups(int64_t size) { return size / (kVectors * kLanes); }

  RowMaxima(int64_t vocab, Scratch& scratch) {
    scratch.take(maxima_, groups(vocab) * kLanes);
    scratch.take(sample_, groups(vocab));
  }

  // Returns the largest logit, or NaN if there is one.
  template <class Element>
  float find(const LogitRow<Element>& row) {
    groups_ = groups(row.size());
    Floats best = splat(-INFINITY);
    Ints is_nan{};
    for (int64_t g = 0; g < groups_; ++g) {
      Floats some[4] = {splat(-INFINITY), splat(-INFINITY), splat(-INFINITY), splat(-INFINITY)};
      for (int64_t at = g * kVectors; at < (g + 1) * kVectors; at += 4) {
        for (int i = 0; i < 4; ++i) {
          const Floats v = row.whole_vector(at + i);
          is_nan |= v != v;
          some[i] = max(v, some[i]);
        }
      }
      const Floats group = max(max(some[0], some[1]), max(some[2], some[3]));
      store(maxima_ + g * kLanes, group);
      best = max(group, best);
    }
    for (int64_t at = groups_ * kVectors; at < row.vectors(); ++at) {
      const Floats v = row.vector(at);
      is_nan |= v != v;
      best = max(v, best);
    }
    largest_ = -INFINITY;
    for (int i = 0; i < kLanes; ++i) {
      if (is_nan[i]) return NAN;
      largest_ = std::max(largest_, best[i]);
    }
    return largest_;
  }

  // Returns the first token with the largest logit, which is finite.
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

  // Estimates the `k`-th largest logit from one chunk of each group; the lowest float if a row
  // has few groups.
  float estimate_kth_largest(int64_t k, int64_t size) const {
    if (groups_ < kMinGroups) return std::numeric_limits<float>::lowest();
    for (int64_t g = 0; g < groups_; ++g) sample_[g] = maxima_[g * kLanes + g % kLanes];
    const double chunks = 1 - std::pow(1 - std::min(1.0, double(k) / size), double(kVectors));
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

// Sums floats in doubles.
class WideSum {
 public:
  CA_INLINE void take(Floats& some) {
    for (int i = 0; i < kLanes; ++i) lanes_[i] += double(some[i]);
    some = Floats{};
  }

  double total() const {
    double sum = 0;
    for (double lane : lanes_) sum += lane;
    return sum;
  }

 private:
  double lanes_[kLanes] = {};
};

class RowHead {
 public:
  RowHead(int64_t vocab, Scratch& scratch) {
    scratch.take(values_, vocab + kLanes);
    scratch.take(ids_, vocab + kLanes);
  }

  int64_t count() const { return count_; }
  const float* values() const { return values_; }
  const int32_t* ids() const { return ids_; }  // ascending

  // Takes the logits >= least, which is finite.
  template <class Element>
  void take(const LogitRow<Element>& row, float least) {
    Taker taker{values_, ids_, least};
    for (int64_t at = 0; at < row.whole(); ++at) taker.take(row.vector_again(at), at);
    if (row.whole() < row.vectors()) taker.take(row.vector(row.whole()), row.whole());
    count_ = taker.values - values_;
  }

  // Also returns the sum of exp((logit - largest) * inverse) over the others.
  template <class Element>
  double take(const LogitRow<Element>& row, float least, float largest, float inverse) {
    WideSum sum;
    Floats some{};
    Taker taker{values_, ids_, least};
    const auto take_vector = [&](Floats v, int64_t at) {
      const Floats weights = vexp((v - splat(largest)) * splat(inverse));
      some += select(v >= splat(least), Floats{}, weights);
      taker.take(v, at);
    };
    int64_t at = 0;
    for (; at + kBlock <= row.whole(); sum.take(some))
      for (const int64_t end = at + kBlock; at < end; ++at) take_vector(row.vector_again(at), at);
    for (; at < row.vectors(); ++at) take_vector(row.vector(at), at);
    sum.take(some);
    count_ = taker.values - values_;
    return sum.total();
  }

 private:
  static constexpr int64_t kBlock = 16;

  // A copy of the head's pointers that stays in registers.
  struct Taker {
    float* values;
    int32_t* ids;
    float least;

#if defined(__AVX512F__)
    CA_INLINE void take(Floats v, int64_t at) {
      const __mmask16 is_in = _mm512_cmp_ps_mask(v, splat(least), _CMP_GE_OQ);
      const Ints own = ramp() + splat(int32_t(at * kLanes));
      store(values, bit_cast<Floats>(_mm512_maskz_compress_ps(is_in, v)));
      _mm512_storeu_si512(ids, _mm512_maskz_compress_epi32(is_in, bit_cast<__m512i>(own)));
      const int count = __builtin_popcount(is_in);
      values += count, ids += count;
    }
#else
    CA_INLINE void take(Floats v, int64_t at) {
      if (!any(v >= splat(least))) return;
      for (int i = 0; i < kLanes; ++i) {
        *values = v[i], *ids = int32_t(at * kLanes + i);
        const int count = v[i] >= least;
        values += count, ids += count;
      }
    }

    static CA_INLINE bool any(Ints mask) {
#if defined(__AVX2__)
      return _mm256_movemask_epi8(bit_cast<__m256i>(mask));
#elif defined(__x86_64__)
      return _mm_movemask_epi8(bit_cast<__m128i>(mask));
#else
      return mask[0] | mask[1] | mask[2] | mask[3];
#endif
    }
#endif
  };

  float* values_;
  int32_t* ids_;
  int64_t count_ = 0;
};

}  // namespace compiled_attn
