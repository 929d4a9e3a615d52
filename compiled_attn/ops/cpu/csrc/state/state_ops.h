// The ops `state_conv_`, `state_delta_`, `state_ssd_` and `state_scan_`.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cmath>
#include <vector>

#include "arguments.h"
#include "replay.h"
#include "state/state_args.h"

namespace compiled_attn {

constexpr int kNoAxis = -1;

inline StateInput state_input(const char* name, const Tensor& tensor, int token, int head) {
  const auto dtype = dtype_code(tensor.scalar_type());
  if (!dtype || is_quantised(*dtype)) {
    fail(text(name, ": float32, bfloat16 or float16"),
         torch::headeronly::toString(tensor.scalar_type()), "convert it with .to()");
  }
  if (token != tensor.dim() - 1 && head != tensor.dim() - 1) check_rows(name, tensor);
  const auto stride = [&](int axis) { return axis == kNoAxis ? 0 : tensor.stride(axis); };
  return {tensor.const_data_ptr(), stride(token), stride(head), *dtype};
}

// The tables of a step.
struct StateStep {
  Tensor slots, seq_lens, query_start_loc;
};

inline StateArgs state_args(StateKind kind, const Tensor& state, const StateStep& step) {
  check_shape("slots", step.slots, {kAny});
  const int64_t requests = step.slots.size(0);
  check_dense("slots", step.slots, {requests}, ScalarType::Int);
  check_dense("seq_lens", step.seq_lens, {requests}, ScalarType::Int);
  check_dense("query_start_loc", step.query_start_loc, {requests + 1}, ScalarType::Int);
  StateArgs args{};
  args.kind = kind;
  args.slots = data_of<int32_t>(step.slots);
  args.seq_lens = data_of<int32_t>(step.seq_lens);
  args.query_start_loc = data_of<int32_t>(step.query_start_loc);
  args.requests = requests;
  // The cast drops const; the schemas declare it mutable.
  args.state = const_cast<void*>(state.const_data_ptr());
  args.num_slots = state.size(0);
  args.heads = args.groups = 1;
  return args;
}

inline void check_state(const Tensor& state, std::initializer_list<int64_t> shape,
                        ScalarType dtype, std::initializer_list<Memory> inputs,
                        const StateStep& step) {
  check_dense("state", state, shape, dtype);
  const Memory written("state", state);
  check_apart(inputs, {written});
  check_apart({{"slots", step.slots},
               {"seq_lens", step.seq_lens},
               {"query_start_loc", step.query_start_loc}},
              {written});
}

inline void check_groups(const char* name, int64_t groups, int64_t heads) {
  if (groups < 1 || heads % groups) {
    fail(text(name, " whose heads divide ", heads), std::to_string(groups), "match the heads");
  }
}

// Throws the error of a status, worded as the Python reference words it.
[[noreturn]] inline void explain(int32_t status, const int64_t error[4], const StateArgs& args) {
  switch (status) {
    case kBadOffsets:
      fail(text("rows of request ", error[0], " in 0..", args.tokens, ", in order"),
           text(error[1], "..", error[2]),
           "query_start_loc is a running sum that ends at the tokens of the step");
    case kBadLength:
      fail(text("seq_lens[", error[0], "] of 0 or at least its ", error[2], " rows"),
           std::to_string(error[1]), "it counts the tokens after this step");
    case kBadSlot:
      fail(text("slots[", error[0], "] in 0..", args.num_slots - 1), std::to_string(error[1]),
           "padding has slot 0");
    default:
      fail("scratch memory", "none", "free memory");
  }
}

inline void update_states(StateArgs& args) {
  args.threads = torch::stable::get_num_threads();
  int64_t error[4] = {};
  if (const int32_t status = compiled_attn_state(&args, error)) explain(status, error, args);
}

inline void replay_state(const int64_t* words) {
  auto args = read_args<StateArgs>(words);
  constexpr const char* kNames[] = {"state_conv_", "state_delta_", "state_ssd_", "state_scan_"};
  in_op(kNames[args.kind], [&] { update_states(args); });
}

inline Tensor run(StateArgs& args, const Tensor& like, ScalarType dtype) {
  const auto sizes = like.sizes();
  Tensor out =
      torch::stable::new_empty(like, std::vector<int64_t>(sizes.begin(), sizes.end()), dtype);
  args.out = out.mutable_data_ptr();
  args.tokens = like.size(0);
  args.out_row = args.tokens ? like.numel() / args.tokens : 0;
  args.out_dtype = *dtype_code(dtype);
  update_states(args);
  if (CallRecorder* recorder = CallRecorder::active()) {
    recorder->begin(replay_state);
    recorder->put(args, kStateAddresses);
  }
  return out;
}

inline Tensor state_conv_(Tensor x, Tensor weight, OptionalTensor bias, Tensor state, Tensor slots,
                          Tensor seq_lens, Tensor query_start_loc, bool silu) {
  return in_op("state_conv_", [&] {
    check_shape("x", x, {kAny, kAny});
    const int64_t channels = x.size(1);
    check_shape("weight", weight, {channels, kAny});
    if (weight.size(1) < 1) fail("weight of at least one tap", list(weight.sizes()), "give it one");
    check_dense("weight", weight, {channels, weight.size(1)}, x.scalar_type());
    if (bias) check_dense("bias", *bias, {channels}, x.scalar_type());
    const StateStep step{slots, seq_lens, query_start_loc};
    check_state(state, {kAny, channels, weight.size(1) - 1}, x.scalar_type(),
                {{"x", x}, {"weight", weight}, {"bias", bias}}, step);
    auto args = state_args(kConvState, state, step);
    args.in[0] = state_input("x", x, 0, kNoAxis);
    args.in[1] = state_input("weight", weight, kNoAxis, kNoAxis);
    if (bias) args.in[2] = state_input("bias", *bias, kNoAxis, kNoAxis);
    args.rows = channels, args.columns = weight.size(1) - 1, args.silu = silu;
    return run(args, x, x.scalar_type());
  });
}

inline Tensor state_delta_(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor state,
                           Tensor slots, Tensor seq_lens, Tensor query_start_loc, bool l2norm,
                           std::optional<double> scale) {
  return in_op("state_delta_", [&] {
    check_shape("q", q, {kAny, kAny, kAny});
    check_shape("k", k, {q.size(0), q.size(1), q.size(2)});
    check_shape("v", v, {q.size(0), kAny, kAny});
    const int64_t heads = v.size(1), keys = q.size(2);
    check_groups("q and k", q.size(1), heads);
    const bool by_channel = g.dim() == 3;
    if (by_channel) {
      check_shape("g", g, {q.size(0), heads, keys});
    } else {
      check_shape("g", g, {q.size(0), heads});
    }
    check_shape("beta", beta, {q.size(0), heads});
    const StateStep step{slots, seq_lens, query_start_loc};
    check_state(state, {kAny, heads, keys, v.size(2)}, ScalarType::Float,
                {{"q", q}, {"k", k}, {"v", v}, {"g", g}, {"beta", beta}}, step);
    auto args = state_args(kDeltaState, state, step);
    args.in[0] = state_input("q", q, 0, 1), args.in[1] = state_input("k", k, 0, 1);
    args.in[2] = state_input("v", v, 0, 1), args.in[3] = state_input("g", g, 0, 1);
    args.in[4] = state_input("beta", beta, 0, 1);
    args.heads = heads, args.groups = q.size(1), args.rows = keys, args.columns = v.size(2);
    args.l2norm = l2norm, args.decays_by_channel = by_channel;
    args.scale = scale.value_or(1 / std::sqrt(double(keys)));
    return run(args, v, v.scalar_type());
  });
}

inline Tensor state_ssd_(Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, OptionalTensor d,
                         Tensor state, Tensor slots, Tensor seq_lens, Tensor query_start_loc) {
  return in_op("state_ssd_", [&] {
    check_shape("x", x, {kAny, kAny, kAny});
    const int64_t tokens = x.size(0), heads = x.size(1);
    check_shape("dt", dt, {tokens, heads});
    check_dtype("dt", dt, ScalarType::Float);
    check_shape("A", a, {heads});
    check_shape("B", b, {tokens, kAny, kAny});
    check_shape("C", c, {tokens, b.size(1), b.size(2)});
    check_groups("B and C", b.size(1), heads);
    if (d) check_shape("D", *d, {heads});
    const StateStep step{slots, seq_lens, query_start_loc};
    check_state(state, {kAny, heads, x.size(2), b.size(2)}, ScalarType::Float,
                {{"x", x}, {"dt", dt}, {"A", a}, {"B", b}, {"C", c}, {"D", d}}, step);
    auto args = state_args(kSsdState, state, step);
    args.in[0] = state_input("x", x, 0, 1), args.in[1] = state_input("dt", dt, 0, 1);
    args.in[2] = state_input("A", a, kNoAxis, 0);
    args.in[3] = state_input("B", b, 0, 1), args.in[4] = state_input("C", c, 0, 1);
    if (d) args.in[5] = state_input("D", *d, kNoAxis, 0);
    args.heads = heads, args.groups = b.size(1), args.rows = x.size(2), args.columns = b.size(2);
    return run(args, x, ScalarType::Float);
  });
}

inline Tensor state_scan_(Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, OptionalTensor d,
                          Tensor state, Tensor slots, Tensor seq_lens, Tensor query_start_loc) {
  return in_op("state_scan_", [&] {
    check_shape("x", x, {kAny, kAny});
    const int64_t tokens = x.size(0), channels = x.size(1);
    check_shape("dt", dt, {tokens, channels});
    check_dtype("dt", dt, ScalarType::Float);
    check_shape("A", a, {channels, kAny});
    check_shape("B", b, {tokens, a.size(1)});
    check_shape("C", c, {tokens, a.size(1)});
    if (d) check_shape("D", *d, {channels});
    const StateStep step{slots, seq_lens, query_start_loc};
    check_state(state, {kAny, channels, a.size(1)}, ScalarType::Float,
                {{"x", x}, {"dt", dt}, {"A", a}, {"B", b}, {"C", c}, {"D", d}}, step);
    auto args = state_args(kScanState, state, step);
    args.in[0] = state_input("x", x, 0, kNoAxis), args.in[1] = state_input("dt", dt, 0, kNoAxis);
    args.in[2] = state_input("A", a, kNoAxis, 0);
    args.in[3] = state_input("B", b, 0, kNoAxis), args.in[4] = state_input("C", c, 0, kNoAxis);
    if (d) {
      check_rows("D", *d);
      args.in[5] = state_input("D", *d, kNoAxis, kNoAxis);
    }
    args.rows = channels, args.columns = a.size(1);
    return run(args, x, ScalarType::Float);
  });
}

}  // namespace compiled_attn
