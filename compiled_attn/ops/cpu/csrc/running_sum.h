// The token at a place of the running sum of a row's weights, the largest first.
//
// Bins of logits tell where a sum is reached, and only that bin is sorted. A token counts where all
// sums that may be true give it: those of the weights outside the head are known within bounds, and
// doubles add up differently in each order.
#pragma once

#include <optional>

#include "row_head.h"

namespace compiled_attn {

// How the token of a row is drawn.
struct DrawSettings {
  double temperature;
  int64_t top_k;  // 1 or more
  double top_p, min_p, uniform;
};

// The least and the greatest that a sum may be.
struct Bounds {
  double low, high;
};

// e^x for x <= 0, relative error 2^-50 and 1 at 0; below -700 it is e^-700. Taylor's polynomial next
// to a power of two.
CA_INLINE double exponential(double x) {
  const double in = x < -700.0 ? -700.0 : x;
  const double shifted = in * 1.44269504088896340736 + 0x1.8p52;  // rounds
  const double n = shifted - 0x1.8p52;
  // The logarithm of 2 in two parts, of which the first ends in zeros.
  const double r = in - n * 6.93147180369123816490e-01 - n * 1.90821492927058770002e-10;
  double p = 1.0 / 6227020800;
  p = p * r + 1.0 / 479001600;
  p = p * r + 1.0 / 39916800;
  p = p * r + 1.0 / 3628800;
  p = p * r + 1.0 / 362880;
  p = p * r + 1.0 / 40320;
  p = p * r + 1.0 / 5040;
  p = p * r + 1.0 / 720;
  p = p * r + 1.0 / 120;
  p = p * r + 1.0 / 24;
  p = p * r + 1.0 / 6;
  p = p * r + 0.5;
  p = p * r + 1.0;
  p = p * r + 1.0;
  return bits_as<double>(bits_as<uint64_t>(p) + (bits_as<uint64_t>(shifted) << 52));
}

class RunningSum {
 public:
  RunningSum(int64_t vocab, Scratch& scratch) : vocab_(vocab) {
    scratch.take(weights_, vocab);
    scratch.take(bins_, padded<kBlock>(vocab));
    scratch.take(members_, vocab);
  }

  // The token, or none where it is not sure which. The head has all logits that are not below
  // `least`; the others weigh `rest`, if that is known.
  std::optional<int64_t> token(const RowHead& head, const DrawSettings& draw, float largest,
                               float least, std::optional<Bounds> rest) {
    const float below = std::nextafter(least, -INFINITY);  // or less have the others
    const double lowest = (double(below) - largest) / draw.temperature;
    begin(head, draw.temperature, largest, lowest);
    const double weight = exponential(lowest);
    if (!rest) rest = Bounds{0, double(vocab_) * weight};
    Bounds total{here() + rest->low, here() + rest->high};
    if (draw.top_k <= count_)
      total = exactly(sum_of(draw.top_k));
    else if (draw.top_k < vocab_)
      total.low = here();
    if (draw.top_p < 1) {
      const auto last = at_sum({total.low * draw.top_p, total.high * draw.top_p});
      if (!last) return std::nullopt;
      total = exactly(last->sum);
    }
    if (draw.min_p > 0) {
      const auto kept = likely(draw.min_p);
      if (!kept) return std::nullopt;
      const double sum = sum_of(*kept);
      const bool ends_here = *kept < count_ || weight < draw.min_p * (1 - kUnsure);
      total = {std::min(total.low, sum), ends_here ? std::min(total.high, sum) : total.high};
    }
    const auto found = at_sum({total.low * draw.uniform, total.high * draw.uniform});
    if (!found) return std::nullopt;
    return head.ids()[found->member];
  }

 private:
  static constexpr int kBins = 2048;
  static constexpr int kBlock = 32;
  static constexpr double kFar = 60;  // weights below e^-60 share the last bin
  static constexpr double kUnsure = 0x1p-40;

  struct Place {
    int64_t member;  // of the head
    double sum;      // up to it
  };

  static Bounds exactly(double sum) { return {sum, sum}; }
  double here() const { return sums_[kBins]; }

  void begin(const RowHead& head, double temperature, float largest, double lowest) {
    count_ = head.count(), values_ = head.values();
    const double span = std::min(kFar, -lowest);
    const double scale = span > 1e-290 ? kBins / span : 0;
    const double inverse = std::min(1 / temperature, std::numeric_limits<double>::max());
    std::fill(bins_ + count_, bins_ + padded<kBlock>(count_), kBins);  // none of them
    for (int64_t i = 0; i < count_; ++i) {
      const double x = (double(values_[i]) - largest) * inverse;
      const double place = x * -scale;
      weights_[i] = exponential(x);
      bins_[i] = uint16_t(int32_t(place < kBins - 1 ? place : kBins - 1));
    }
    std::fill(sums_, sums_ + kBins + 1, 0);
    std::fill(counts_, counts_ + kBins + 1, 0);
    for (int64_t i = 0; i < count_; ++i) {
      sums_[bins_[i] + 1] += weights_[i];
      ++counts_[bins_[i] + 1];
    }
    for (int bin = 0; bin < kBins; ++bin) {
      sums_[bin + 1] += sums_[bin];
      counts_[bin + 1] += counts_[bin];
    }
  }

  // The first token at which the sum is above the target, whichever it is and however one adds: all
  // weights are off by 2^-45 at most where they are worth adding, and each addition by 2^-53, here
  // as in another sum, of which target and place are.
  std::optional<Place> at_sum(Bounds target) {
    const double* after = std::upper_bound(sums_ + 1, sums_ + kBins + 1, target.low);
    if (after == sums_ + kBins + 1) return std::nullopt;
    const int bin = int(after - sums_ - 1);
    const int64_t size = sort(bin);
    double before = sums_[bin];
    for (int64_t i = 0; i < size; ++i) {
      const double sum = before + weights_[members_[i]];
      if (sum > target.low) {
        const double slack = sum * (0x1p-43 + double(vocab_) * 0x1p-51);
        const bool is_sure =
            (before == 0 || before + slack <= target.low) && target.high + slack <= sum;
        return is_sure ? std::optional<Place>({members_[i], sum}) : std::nullopt;
      }
      before = sum;
    }
    return std::nullopt;
  }

  // The sum of the first tokens, of which the head has so many.
  double sum_of(int64_t count) {
    if (count == count_) return here();
    const int bin = int(std::upper_bound(counts_ + 1, counts_ + kBins + 1, count) - counts_ - 1);
    sort(bin);
    double sum = sums_[bin];
    for (int64_t i = 0; i < count - counts_[bin]; ++i) sum += weights_[members_[i]];
    return sum;
  }

  // How many weigh at least so much, unless that depends on a rounding.
  std::optional<int64_t> likely(double min_p) const {
    int64_t likely = 0, unsure = 0;
    for (int64_t i = 0; i < count_; ++i) {
      likely += weights_[i] >= min_p;
      unsure += weights_[i] < 1 && std::abs(weights_[i] - min_p) <= kUnsure * min_p;
    }
    return unsure ? std::nullopt : std::optional<int64_t>(likely);
  }

  // Puts the tokens of a bin in order: the largest first, of equal ones the lower id.
  int64_t sort(int bin) {
    const int64_t all = counts_[bin + 1] - counts_[bin];
    int64_t size = 0;
    for (int64_t first = 0; size < all; first += kBlock) {  // most blocks have none
      int left = 0;
      for (int i = 0; i < kBlock; ++i) left += bins_[first + i] == bin;
      for (int64_t i = first; left; ++i)
        if (bins_[i] == bin) members_[size++] = int32_t(i), --left;
    }
    const auto is_before = [this](int32_t a, int32_t b) {
      return values_[a] != values_[b] ? values_[a] > values_[b] : a < b;
    };
    if (!std::is_sorted(members_, members_ + size, is_before))
      std::sort(members_, members_ + size, is_before);
    return size;
  }

  int64_t vocab_, count_ = 0;
  const float* values_ = nullptr;
  double* weights_;
  uint16_t* bins_;
  int32_t* members_;
  double sums_[kBins + 1];  // of the bins before each
  int64_t counts_[kBins + 1];
};

}  // namespace compiled_attn
