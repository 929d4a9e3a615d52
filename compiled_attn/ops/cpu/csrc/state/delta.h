// Gated delta rule: state [Dk, Dv] of a head, which forgets what it holds for a key before it
// stores the key's value.
#pragma once

#include "state/step.h"

namespace compiled_attn {

// A head's columns are independent of each other.
class DeltaColumns {
 public:
  static int64_t items(const StateArgs& args) { return args.heads * panels(args); }

  DeltaColumns(const StateArgs& args, Scratch& scratch) : args_(args), keys_(args.rows) {
    for (float** each : {&query_, &key_, &decay_, &decayed_key_})
      scratch.take(*each, padded<kLanes>(keys_));
    scratch.take(value_, kColumns);
    scratch.take(out_, kColumns);
    scratch.take(state_, keys_ * kColumns);
  }

  void run(const StateRequest& request, int64_t item) {
    const int64_t head = item / panels(args_), first = item % panels(args_) * kColumns;
    const int64_t n = std::min(kColumns, args_.columns - first);
    if (n == kColumns) return run<kVectors>(request, head, first, n);
    for (int64_t i = 0; i < n; i += kLanes)
      run<1>(request, head, first + i, std::min<int64_t>(n - i, kLanes));
  }

 private:
  // State of 128 keys stays in the first-level cache.
  static constexpr int kVectors = 4;
  static constexpr int64_t kColumns = kVectors * kLanes;

  static int64_t panels(const StateArgs& args) { return (args.columns + kColumns - 1) / kColumns; }

  template <int vectors>
  void run(const StateRequest& request, int64_t head, int64_t first, int64_t n) {
    const int64_t columns = args_.columns;
    float* slot = static_cast<float*>(args_.state) +
                  (request.slot * args_.heads + head) * keys_ * columns + first;
    // Whole vectors are read from the slot by the first token, and written by the last.
    const bool is_whole = n == vectors * kLanes;
    const bool reads = request.has_past && is_whole, writes = request.slot && is_whole;
    if (!reads) std::fill_n(state_, keys_ * vectors * kLanes, 0.0f);
    if (request.has_past && !is_whole)
      for (int64_t i = 0; i < keys_; ++i)
        std::copy_n(slot + i * columns, n, state_ + i * kLanes);
    for (int64_t t = request.begin; t < request.end; ++t) {
      prepare(t, head);
      read(args_.in[2], t, head, first, n, value_);
      const bool from_slot = reads && t == request.begin, to_slot = writes && t + 1 == request.end;
      update<vectors>(from_slot ? slot : state_, from_slot ? columns : vectors * kLanes,
                      to_slot ? slot : state_, to_slot ? columns : vectors * kLanes,
                      read(args_.in[4], t, head));
      write_out(args_, t, head * columns + first, n, out_);
    }
    if (request.slot && !is_whole)
      for (int64_t i = 0; i < keys_; ++i)
        std::copy_n(state_ + i * kLanes, n, slot + i * columns);
  }

  void prepare(int64_t token, int64_t head) {
    const int64_t group = head / (args_.heads / args_.groups);
    read(args_.in[0], token, group, 0, keys_, query_);
    read(args_.in[1], token, group, 0, keys_, key_);
    float scale = float(args_.scale), key_scale = 1;
    if (args_.l2norm) scale *= inverse_norm(query_), key_scale = inverse_norm(key_);
    Floats decay{};
    if (args_.decays_by_channel) {
      read(args_.in[3], token, head, 0, keys_, decay_);
    } else {
      decay = vexp(splat(read(args_.in[3], token, head)));
    }
    for (int64_t i = 0; i < keys_; i += kLanes) {
      if (args_.decays_by_channel) decay = vexp(load(decay_ + i));
      const Floats key = load(key_ + i) * splat(key_scale);
      store(query_ + i, load(query_ + i) * splat(scale));
      store(key_ + i, key);
      store(decay_ + i, decay);
      store(decayed_key_ + i, decay * key);
    }
  }

  float inverse_norm(const float* x) const {
    Floats sum{};
    for (int64_t i = 0; i < keys_; i += kLanes) sum += load(x + i) * load(x + i);
    return 1 / std::sqrt(hsum(sum, Floats{}, Floats{}, Floats{})[0] + 1e-6f);
  }

  // One token: reads what the decayed state holds for the key, stores beta times the difference
  // from the value, and reads the result for the query.
  template <int vectors>
  CA_INLINE void update(const float* from, int64_t from_row, float* to, int64_t to_row,
                        float beta) {
    Floats held[vectors] = {}, change[vectors], sum[vectors] = {};
    for (int64_t i = 0; i < keys_; ++i) {
      const Floats key = splat(decayed_key_[i]);
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) held[v] += load(from + i * from_row + v * kLanes) * key;
    }
    for (int v = 0; v < vectors; ++v)
      change[v] = (load(value_ + v * kLanes) - held[v]) * splat(beta);
    for (int64_t i = 0; i < keys_; ++i) {
      const Floats decay = splat(decay_[i]), key = splat(key_[i]), query = splat(query_[i]);
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) {
        const Floats state = load(from + i * from_row + v * kLanes) * decay + key * change[v];
        store(to + i * to_row + v * kLanes, state);
        sum[v] += state * query;
      }
    }
    for (int v = 0; v < vectors; ++v) store(out_ + v * kLanes, sum[v]);
  }

  const StateArgs& args_;
  const int64_t keys_;
  float *query_, *key_, *decay_, *decayed_key_, *value_, *out_, *state_;
};

}  // namespace compiled_attn
