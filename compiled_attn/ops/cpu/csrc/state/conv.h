// Causal depthwise convolution with a state of the last K - 1 inputs.
#pragma once

#include "state/step.h"

namespace compiled_attn {

template <class Element>
class ConvChannels {
 public:
  static int64_t items(const StateArgs& args) { return (args.rows + kChannels - 1) / kChannels; }

  ConvChannels(const StateArgs& args, Scratch& scratch)
      : args_(args), taps_(args.columns + 1), past_(args.columns) {
    scratch.take(rows_, taps_ * kLanes);
    scratch.take(weights_, taps_ * kLanes);
    scratch.take(before_, taps_ * kLanes);
  }

  void run(const StateRequest& request, int64_t item) {
    const int64_t end = std::min((item + 1) * kChannels, args_.rows);
    for (int64_t c = item * kChannels; c < end; c += kLanes)
      run(request, c, std::min<int64_t>(end - c, kLanes));
  }

 private:
  static constexpr int64_t kChannels = 8 * kLanes;

  void run(const StateRequest& request, int64_t channel, int64_t n) {
    const int64_t tokens = request.end - request.begin, stride = args_.in[0].token;
    const Element* x = data(0) + request.begin * stride + channel;
    Element* state =
        static_cast<Element*>(args_.state) + (request.slot * args_.rows + channel) * past_;
    transpose(data(1) + channel * taps_, taps_, n, weights_);
    if (request.has_past) {
      transpose(state, past_, n, before_);
    } else {
      std::fill_n(before_, past_ * kLanes, 0.0f);
    }
    const Floats bias = args_.in[2].data ? some(data(2) + channel, n) : Floats{};
    Element* out = static_cast<Element*>(args_.out) + request.begin * args_.out_row + channel;
    for (int64_t t = 0; t < tokens; ++t, out += args_.out_row) {
      Floats sum = bias;
      for (int64_t k = 0, at = t - past_; k < taps_; ++k, ++at) {
        const Floats input =
            at < 0 ? load(before_ + (past_ + at) * kLanes) : some(x + at * stride, n);
        sum += input * load(weights_ + k * kLanes);
      }
      write(out, sum, n);
      // Of the rounded sum, as the layers of transformers compute it.
      if (args_.silu) write(out, vsilu(some(out, n)), n);
    }
    if (!request.slot) return;
    for (int64_t i = 0; i < n; ++i, state += past_) {
      for (int64_t j = 0, at = tokens - past_; j < past_; ++j, ++at) {
        if (at >= 0) {
          state[j] = x[at * stride + i];
        } else {
          state[j] = request.has_past ? state[past_ + at] : Element{};
        }
      }
    }
  }

  const Element* data(int input) const { return static_cast<const Element*>(args_.in[input].data); }

  static CA_INLINE Floats some(const Element* from, int64_t n) {
    if (n == kLanes) return load(from);
    Element all[kLanes] = {};
    std::memcpy(all, from, n * sizeof *from);
    return load(all);
  }

  // From [n, count] to [count, kLanes].
  void transpose(const Element* from, int64_t count, int64_t n, float* to) {
    to_floats(from, n * count, rows_);
    for (int64_t i = 0; i < n; ++i)
      for (int64_t j = 0; j < count; ++j) to[j * kLanes + i] = rows_[i * count + j];
  }

  const StateArgs& args_;
  const int64_t taps_, past_;
  float *rows_, *weights_, *before_;
};

}  // namespace compiled_attn
