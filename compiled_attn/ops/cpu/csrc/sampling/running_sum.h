// Finds the token at a position in the cumulative weights, sorted by descending weight.
//
// Locates the position by bins of logits and sorts only that bin. Returns a token only if every
// admissible sum gives it: weights outside the head are known within bounds, and doubles depend on
// the order of addition.
#pragma once

#include <optional>

#include "sampling/logit_row.h"

namespace compiled_attn {

// Sampling settings of a row.
struct SamplingSettings {
  double temperature;
  int64_t top_k;  // 1 or more
  double top_p, min_p, uniform;
};

// Lower and upper bound of a sum.
struct Bounds {
  double low, high;
};

class RunningSum {
 public:
  RunningSum(int64_t vocab, Scratch& scratch) : vocab_(vocab) {
    scratch.take(weights_, vocab);
    scratch.take(bins_, padded<kBlock>(vocab));
    scratch.take(members_, vocab);
  }

  // Returns the token, or nullopt if it is uncertain. The head has all logits >= least; the others
  // weigh `rest`, if known.
  std::optional<int64_t> token(const RowHead& head, const SamplingSettings& settings, float largest,
                               float least, std::optional<Bounds> rest) {
    const float below = std::nextafter(least, -INFINITY);  // an upper bound of the others
    const double lowest = (double(below) - largest) / settings.temperature;
    begin(head, settings.temperature, largest, lowest);
    const double weight = exp_double(lowest);
    if (!rest) rest = Bounds{0, double(vocab_) * weight};
    Bounds total{here() + rest->low, here() + rest->high};
    if (settings.top_k <= count_)
      total = exactly(sum_of(settings.top_k));
    else if (settings.top_k < vocab_)
      total.low = here();
    if (settings.top_p < 1) {
      const auto last = at_sum({total.low * settings.top_p, total.high * settings.top_p});
      if (!last) return std::nullopt;
      total = exactly(last->sum);
    }
    if (settings.min_p > 0) {
      const auto count = likely(settings.min_p);
      if (!count) return std::nullopt;
      const double sum = sum_of(*count);
      const bool ends_here = *count < count_ || weight < settings.min_p * (1 - kUnsure);
      total = {std::min(total.low, sum), ends_here ? std::min(total.high, sum) : total.high};
    }
    const auto found = at_sum({total.low * settings.uniform, total.high * settings.uniform});
    if (!found) return std::nullopt;
    return head.ids()[found->member];
  }

 private:
  static constexpr int kBins = 2048;
  static constexpr int kBlock = 32;
  static constexpr double kFar = 60;  // weights below e^-60 share the last bin
  static constexpr double kUnsure = 0x1p-40;

  struct Place {
    int64_t member;  // index in the head
    double sum;  // up to and including it
  };

  static Bounds exactly(double sum) { return {sum, sum}; }
  double here() const { return sums_[kBins]; }

  void begin(const RowHead& head, double temperature, float largest, double lowest) {
    count_ = head.count(), values_ = head.values();
    const double span = std::min(kFar, -lowest);
    const double scale = span > 1e-290 ? kBins / span : 0;
    const double inverse = std::min(1 / temperature, std::numeric_limits<double>::max());
    std::fill(bins_ + count_, bins_ + padded<kBlock>(count_), kBins);  // padding is in no bin
    for (int64_t i = 0; i < count_; ++i) {
      const double x = (double(values_[i]) - largest) * inverse;
      const double bin = x * -scale;
      weights_[i] = exp_double(x);
      bins_[i] = uint16_t(int32_t(bin < kBins - 1 ? bin : kBins - 1));
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

  // Returns the first token whose cumulative sum exceeds the target, if that is certain. Relative
  // errors: 2^-45 per weight that matters, 2^-53 per addition, here and in any other order.
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

  // Sum of the first `count` tokens of the head.
  double sum_of(int64_t count) {
    if (count == count_) return here();
    const int bin = int(std::upper_bound(counts_ + 1, counts_ + kBins + 1, count) - counts_ - 1);
    sort(bin);
    double sum = sums_[bin];
    for (int64_t i = 0; i < count - counts_[bin]; ++i) sum += weights_[members_[i]];
    return sum;
  }

  // Counts the weights >= min_p; nullopt if rounding decides.
  std::optional<int64_t> likely(double min_p) const {
    int64_t likely = 0, unsure = 0;
    for (int64_t i = 0; i < count_; ++i) {
      likely += weights_[i] >= min_p;
      unsure += weights_[i] < 1 && std::abs(weights_[i] - min_p) <= kUnsure * min_p;
    }
    return unsure ? std::nullopt : std::optional<int64_t>(likely);
  }

  // Sorts the tokens of a bin by descending logit, then id.
  int64_t sort(int bin) {
    const int64_t all = counts_[bin + 1] - counts_[bin];
    int64_t size = 0;
    for (int64_t first = 0; size < all; first += kBlock) {  // most blocks hold none
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
  double sums_[kBins + 1];  // sum of the bins before each
  int64_t counts_[kBins + 1];
};

}  // namespace compiled_attn
