// The largest logits of a row, and the sum of the weights of the others.
#pragma once

#include "row_maxima.h"

namespace compiled_attn {

// Sums of floats, added up in doubles before their roundings count.
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

  // Takes the logits that are not below `least`, a finite number.
  template <class Element>
  void take(const LogitRow<Element>& row, float least) {
    Taker taker{values_, ids_, least};
    for (int64_t at = 0; at < row.whole(); ++at) taker.take(row.vector_again(at), at);
    if (row.whole() < row.vectors()) taker.take(row.vector(row.whole()), row.whole());
    count_ = taker.values - values_;
  }

  // The same; returns the sum of exp((logit - largest) * inverse) of the others.
  template <class Element>
  double take(const LogitRow<Element>& row, float least, float largest, float inverse) {
    WideSum sum;
    Floats some{};
    Taker taker{values_, ids_, least};
    const auto take_vector = [&](Floats v, int64_t at) {
      const Floats weights = exponential((v - all(largest)) * all(inverse));
      some += either(v >= all(least), Floats{}, weights);
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

  // Apart from the head, so that it stays in registers.
  struct Taker {
    float* values;
    int32_t* ids;
    float least;

#if defined(__AVX512F__)
    CA_INLINE void take(Floats v, int64_t at) {
      const __mmask16 is_in = _mm512_cmp_ps_mask(v, all(least), _CMP_GE_OQ);
      const Ints own = ramp() + all(int32_t(at * kLanes));
      store(values, bits_as<Floats>(_mm512_maskz_compress_ps(is_in, v)));
      _mm512_storeu_si512(ids, _mm512_maskz_compress_epi32(is_in, bits_as<__m512i>(own)));
      const int count = __builtin_popcount(is_in);
      values += count, ids += count;
    }
#else
    CA_INLINE void take(Floats v, int64_t at) {
      if (!any(v >= all(least))) return;
      for (int i = 0; i < kLanes; ++i) {
        *values = v[i], *ids = int32_t(at * kLanes + i);
        const int count = v[i] >= least;
        values += count, ids += count;
      }
    }

    static CA_INLINE bool any(Ints mask) {
#if defined(__AVX2__)
      return _mm256_movemask_epi8(bits_as<__m256i>(mask));
#elif defined(__x86_64__)
      return _mm_movemask_epi8(bits_as<__m128i>(mask));
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
