// Selective scans: each row of a state [rows, N] decays, adds dt x B, and is read with C. Mamba 2
// (ssd) has one decay per head, Mamba 1 (scan) one per element.
#pragma once

#include "state/step.h"

namespace compiled_attn {

template <bool decays_by_element>
class ScanRows {
 public:
  static int64_t items(const StateArgs& args) { return args.heads * blocks(args); }

  ScanRows(const StateArgs& args, Scratch& scratch)
      : args_(args), width_(padded<kLanes>(args.columns)) {
    scratch.take(b_, width_);
    scratch.take(c_, width_);
    for (float** each : {&x_, &dt_, &d_, &out_}) scratch.take(*each, padded<kLanes>(kRows));
    scratch.take(state_, kRows * width_);
    scratch.take(a_, decays_by_element ? kRows * width_ : 0);
  }

  void run(const StateRequest& request, int64_t item) {
    const int64_t head = item / blocks(args_), first = item % blocks(args_) * kRows;
    const int64_t n = std::min(kRows, args_.rows - first), columns = args_.columns;
    const bool has_d = args_.in[5].data;
    float* slot = static_cast<float*>(args_.state) +
                  ((request.slot * args_.heads + head) * args_.rows + first) * columns;
    float* state = request.slot && columns == width_ ? slot : state_;
    if (!request.has_past) {
      std::fill_n(state, n * width_, 0.0f);
    } else if (state != slot) {
      std::fill_n(state, n * width_, 0.0f);
      for (int64_t i = 0; i < n; ++i) std::copy_n(slot + i * columns, columns, state + i * width_);
    }
    set_up_layer(head, first, n);
    for (int64_t t = request.begin; t < request.end; ++t) {
      const int64_t group = head / (args_.heads / args_.groups);
      read(args_.in[0], t, head, first, n, x_);
      read(args_.in[3], t, group, 0, columns, b_);
      read(args_.in[4], t, group, 0, columns, c_);
      if (decays_by_element) {
        read(args_.in[1], t, 0, first, n, dt_);
      } else {
        std::fill_n(dt_, kRows, read(args_.in[1], t, head));
      }
      const Floats decay = decays_by_element ? Floats{} : vexp(splat(dt_[0] * a_of_head_));
      int64_t i = 0;
      for (; i + 4 <= n; i += 4) update<4>(state + i * width_, i, decay);
      for (; i < n; ++i) update<1>(state + i * width_, i, decay);
      if (has_d)
        for (i = 0; i < n; i += kLanes)
          store(out_ + i, load(out_ + i) + load(d_ + i) * load(x_ + i));
      write_out(args_, t, head * args_.rows + first, n, out_);
    }
    if (request.slot && state != slot)
      for (int64_t i = 0; i < n; ++i) std::copy_n(state + i * width_, columns, slot + i * columns);
  }

 private:
  static constexpr int64_t kRows = 32;

  static int64_t blocks(const StateArgs& args) { return (args.rows + kRows - 1) / kRows; }

  void set_up_layer(int64_t head, int64_t first, int64_t n) {
    if (decays_by_element) {
      for (int64_t i = 0; i < n; ++i)
        read(args_.in[2], 0, first + i, 0, args_.columns, a_ + i * width_);
      if (args_.in[5].data) read(args_.in[5], 0, 0, first, n, d_);
    } else {
      a_of_head_ = read(args_.in[2], 0, head);
      if (args_.in[5].data) std::fill_n(d_, kRows, read(args_.in[5], 0, head));
    }
  }

  // One token of some rows.
  template <int rows>
  CA_INLINE void update(float* state, int64_t row, Floats decay_of_head) {
    Floats sums[4] = {}, decay[rows], change[rows];
    for (int i = 0; i < rows; ++i) {
      decay[i] = decay_of_head;
      change[i] = splat(dt_[row + i] * x_[row + i]);
    }
    for (int64_t j = 0; j < width_; j += kLanes) {
      const Floats b = load(b_ + j), c = load(c_ + j);
      if (decays_by_element) {
        for (int i = 0; i < rows; ++i)
          decay[i] = load(a_ + (row + i) * width_ + j) * splat(dt_[row + i]);
        vexp(decay);
      }
#pragma GCC unroll 4
      for (int i = 0; i < rows; ++i) {
        const Floats next = load(state + i * width_ + j) * decay[i] + change[i] * b;
        store(state + i * width_ + j, next);
        sums[i] += next * c;
      }
    }
    const Floats4 sum = hsum(sums[0], sums[1], sums[2], sums[3]);
    std::memcpy(out_ + row, &sum, rows * sizeof *out_);
  }

  const StateArgs& args_;
  const int64_t width_;
  float a_of_head_ = 0;
  float *b_, *c_, *x_, *dt_, *d_, *out_, *state_, *a_;
};

}  // namespace compiled_attn
