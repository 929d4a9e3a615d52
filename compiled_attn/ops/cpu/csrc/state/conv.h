// Causal depthwise convolution with a state of the last K - 1 inputs.
#pragma once

#include <utility>

#include "state/step.h"

namespace compiled_attn {

// From [kLanes, count] in memory, `rows`, to its columns.
template <int count, int column, int source>
struct OfColumn {
  static constexpr int at(int i) {
    const int flat = i * count + column;
    return flat / kLanes == source ? kLanes + flat % kLanes : i;
  }
};

template <int count, int column, int... source>
CA_INLINE Floats column_of(const Floats (&rows)[count], std::integer_sequence<int, source...>) {
  Floats v{};
  ((v = shuffle<OfColumn<count, column, source>>(v, rows[source])), ...);
  return v;
}

template <int count, class Element, int... column>
CA_INLINE void load_columns(const Element* from, Floats* to,
                            std::integer_sequence<int, column...> all) {
  Floats rows[count];
  for (int i = 0; i < count; ++i) rows[i] = load(from + i * kLanes);
  ((to[column] = column_of<count, column>(rows, all)), ...);
}

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
    for (int64_t c = item * kChannels; c < end; c += kLanes) {
      const int64_t n = std::min<int64_t>(end - c, kLanes);
      const Panel panel(*this, request, c);
      if (n == kLanes && taps_ == 4) {
        run_whole<4>(panel);
      } else if (n == kLanes && taps_ == 3) {
        run_whole<3>(panel);
      } else {
        run_any(panel, n);
      }
    }
  }

 private:
  static constexpr int64_t kChannels = 8 * kLanes;

  // kLanes channels of a request, or fewer.
  struct Panel {
    Panel(const ConvChannels& all, const StateRequest& request, int64_t channel)
        : request(request), tokens(request.end - request.begin), stride(all.args_.in[0].token) {
      x = all.data(0) + request.begin * stride + channel;
      weight = all.data(1) + channel * all.taps_;
      bias = all.args_.in[2].data ? all.data(2) + channel : nullptr;
      state = static_cast<Element*>(all.args_.state) +
              (request.slot * all.args_.rows + channel) * all.past_;
      out = static_cast<Element*>(all.args_.out) + request.begin * all.args_.out_row + channel;
    }

    const StateRequest& request;
    int64_t tokens, stride;
    const Element *x, *weight, *bias;
    Element *state, *out;
  };

  // Keeps weights and the last inputs in registers.
  template <int taps>
  void run_whole(const Panel& panel) {
    Floats weights[taps], window[taps] = {};
    load_columns<taps>(panel.weight, weights, std::make_integer_sequence<int, taps>{});
    if (panel.request.has_past)
      load_columns<taps - 1>(panel.state, window + 1, std::make_integer_sequence<int, taps - 1>{});
    const Floats bias = panel.bias ? load(panel.bias) : Floats{};
    for (int64_t t = 0; t < panel.tokens; ++t) {
      for (int k = 0; k + 1 < taps; ++k) window[k] = window[k + 1];
      window[taps - 1] = load(panel.x + t * panel.stride);
      Floats sum = bias;
      for (int k = 0; k < taps; ++k) sum += window[k] * weights[k];
      finish(panel.out + t * args_.out_row, sum, kLanes);
    }
    keep<taps - 1>(panel, taps - 1, kLanes);
  }

  void run_any(const Panel& panel, int64_t n) {
    transpose(panel.weight, taps_, n, weights_);
    if (panel.request.has_past) {
      transpose(panel.state, past_, n, before_);
    } else {
      std::fill_n(before_, past_ * kLanes, 0.0f);
    }
    const Floats bias = panel.bias ? some(panel.bias, n) : Floats{};
    for (int64_t t = 0; t < panel.tokens; ++t) {
      Floats sum = bias;
      for (int64_t k = 0, at = t - past_; k < taps_; ++k, ++at) {
        const Floats input = at < 0 ? load(before_ + (past_ + at) * kLanes)
                                    : some(panel.x + at * panel.stride, n);
        sum += input * load(weights_ + k * kLanes);
      }
      finish(panel.out + t * args_.out_row, sum, n);
    }
    keep<0>(panel, past_, n);
  }

  CA_INLINE void finish(Element* out, Floats sum, int64_t n) const {
    if (args_.silu) {
      // Of the rounded sum, as the layers of transformers compute it.
      Element rounded[kLanes];
      write(rounded, sum, kLanes);
      sum = vsilu(load(rounded));
    }
    write(out, sum, n);
  }

  // Writes the last inputs to the slot, bit for bit. count: past, or 0 if the compiler does not
  // know it.
  template <int count>
  CA_INLINE void keep(const Panel& panel, int64_t past, int64_t n) const {
    if (!panel.request.slot) return;
    if (count) past = count;
    for (int64_t i = 0; i < n; ++i) {
      Element* state = panel.state + i * past;
      for (int64_t j = 0, at = panel.tokens - past; j < past; ++j, ++at) {
        if (at >= 0) {
          state[j] = panel.x[at * panel.stride + i];
        } else {
          state[j] = panel.request.has_past ? state[past + at] : Element{};
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
