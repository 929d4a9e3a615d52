// Samples a token from each row of logits on the CPU.
#include <omp.h>

#include <atomic>
#include <new>
#include <vector>

#include "sampling/running_sum.h"
#include "vector/float_mode.h"

namespace compiled_attn {
namespace {

constexpr int64_t kLogitsOfThread = 1 << 16;  // work that is worth waking a thread

// Samples rows one after the other; reuses its buffers.
class TokenSampler {
 public:
  TokenSampler(int64_t vocab, Scratch& scratch)
      : maxima_(vocab, scratch), head_(vocab, scratch), sums_(vocab, scratch) {}

  template <class Element>
  int64_t token(const LogitRow<Element>& row, const SamplingSettings& settings) {
    largest_ = maxima_.find(row);
    if (!std::isfinite(largest_)) return kNoToken;
    if (settings.temperature <= 0) return maxima_.first(row);
    // Logits below `far` weigh nothing, however many there are.
    const float far = at_least(largest_ - kFar * settings.temperature);
    const float least = std::max(far, head_threshold(row.size(), settings));
    std::optional<int64_t> token;
    if (least > far) token = sample_head(row, settings, least);
    if (!token) {
      head_.take(row, far);
      token = sums_.token(head_, settings, largest_, far, std::nullopt);
    }
    return token.value_or(kUndecided);
  }

 private:
  static constexpr double kFar = 60;
  static constexpr int64_t kHead = 4096, kFew = 512;
  // Error of a sum of float exponentials. Relative for exponents above -40: three roundings of
  // 2^-24 times 40, one more without fused multiply-adds. Absolute for the others.
  static constexpr double kError = 0x1p-16, kLeast = 1e-11;
  static constexpr double kColdest = 1e-30, kHottest = 1e30;  // their inverses are finite floats

  static float at_least(double x) {
    return float(std::max(x, double(std::numeric_limits<float>::lowest())));
  }

  static bool keeps_few(const SamplingSettings& settings) { return settings.top_k <= kFew; }
  static bool only_min_p(const SamplingSettings& settings) {
    return settings.top_p >= 1 && settings.min_p > 0;
  }

  float head_threshold(int64_t vocab, const SamplingSettings& settings) {
    if (keeps_few(settings)) return maxima_.estimate_kth_largest(8 * settings.top_k + 64, vocab);
    if (only_min_p(settings))
      return at_least(largest_ + (std::log(settings.min_p) - 1e-3) * settings.temperature);
    return maxima_.estimate_kth_largest(kHead, vocab);
  }

  template <class Element>
  std::optional<int64_t> sample_head(const LogitRow<Element>& row, const SamplingSettings& settings,
                               float least) {
    std::optional<Bounds> rest;
    if (keeps_few(settings) || only_min_p(settings)) {
      head_.take(row, least);
    } else {
      if (settings.temperature < kColdest || settings.temperature > kHottest) return std::nullopt;
      const double sum = head_.take(row, least, largest_, float(1 / settings.temperature));
      rest = {sum * (1 - kError), sum * (1 + kError) + kLeast};
    }
    return sums_.token(head_, settings, largest_, least, rest);
  }

  RowMaxima maxima_;
  RowHead head_;
  RunningSum sums_;
  float largest_ = 0;
};

template <class Element>
void sample_rows(const SampleTokensArgs& args) {
  const int64_t most = std::min(args.rows, 1 + args.rows * args.vocab / kLogitsOfThread);
  const int threads = int(std::clamp<int64_t>(most, 1, args.threads));
  Scratch scratch;
  std::vector<TokenSampler> workers;
  workers.reserve(threads);
  for (int i = 0; i < threads; ++i) workers.emplace_back(args.vocab, scratch);
  std::atomic<int64_t> next{0};
#pragma omp parallel num_threads(threads)
  {
    const FloatMode mode;
    TokenSampler& worker = workers[omp_get_thread_num()];
    const auto row = [&](int64_t r) {
      return static_cast<const Element*>(args.logits) + r * args.logits_row;
    };
    for (int64_t r = next++, following; r < args.rows; r = following) {
      following = next++;
      const LogitRow<Element> logits(row(r), args.vocab, row(std::min(following, args.rows - 1)));
      const int64_t top_k = std::max<int64_t>(args.top_k[r], 1);
      args.tokens[r] = worker.token(
          logits, {args.temperature[r], top_k, args.top_p[r], args.min_p[r], args.uniform[r]});
    }
  }
}

}  // namespace
}  // namespace compiled_attn

extern "C" int32_t compiled_attn_sample_tokens(const compiled_attn::SampleTokensArgs* args) {
  using namespace compiled_attn;
  try {
    if (args->dtype == kBFloat16)
      sample_rows<BFloat16>(*args);
    else if (args->dtype == kFloat16)
      sample_rows<Float16>(*args);
    else
      sample_rows<float>(*args);
    return kOk;
  } catch (const std::bad_alloc&) {
    return kOutOfMemory;
  }
}
