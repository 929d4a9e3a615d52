// The ops `packed_linear`, `packed_linears`, `packed_swiglu` and `packed_rows`.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstring>
#include <vector>

#include "arguments.h"
#include "replay.h"

namespace compiled_attn {

constexpr int64_t kRowsOfPanel = 16;
constexpr int64_t kGroupBytes = 4;  // a float32, or a pair of bfloat16

// Copies row `id` of a packed weight of `groups` groups of inputs; may widen pairs of bfloat16 to
// float32.
template <bool widens>
void copy_packed_row(const char* weight, int64_t groups, int64_t id, char* out) {
  const char* from =
      weight + (id / kRowsOfPanel * groups * kRowsOfPanel + id % kRowsOfPanel) * kGroupBytes;
  for (int64_t k = 0; k < groups; ++k, from += kRowsOfPanel * kGroupBytes)
    if constexpr (widens) {
      uint16_t pair[2];
      std::memcpy(pair, from, sizeof pair);
      const uint32_t wide[] = {uint32_t{pair[0]} << 16, uint32_t{pair[1]} << 16};
      std::memcpy(out + k * sizeof wide, wide, sizeof wide);
    } else {
      std::memcpy(out + k * kGroupBytes, from, kGroupBytes);
    }
}

// Rows of a weight [panels, groups, kRowsOfPanel, ...].
struct PackedRowsArgs {
  const void* weight;
  const int64_t* ids;  // [count]
  void* out;           // [count, row]
  int64_t count, panels, groups;
  int64_t weight_is_bf16;
};

// Returns false, writing nothing, if an id is out of range.
inline bool copy_packed_rows(const PackedRowsArgs& args, int64_t& bad) {
  for (int64_t i = 0; i < args.count; ++i)
    if (args.ids[i] < 0 || args.ids[i] >= args.panels * kRowsOfPanel)
      return bad = args.ids[i], false;
  const int64_t row = args.groups * kGroupBytes * (args.weight_is_bf16 ? 2 : 1);
  const auto copy = args.weight_is_bf16 ? copy_packed_row<true> : copy_packed_row<false>;
  auto* to = static_cast<char*>(args.out);
  for (int64_t i = 0; i < args.count; ++i, to += row)
    copy(static_cast<const char*>(args.weight), args.groups, args.ids[i], to);
  return true;
}

// The arguments of a layer, without its output.
inline PackedLinearArgs layer_of(const Tensor& input, const Tensor& weight, const Tensor* bias) {
  const auto stored = weight.scalar_type();
  const bool is_single = stored == ScalarType::Float;
  const bool weight_is_bf16 = stored == ScalarType::Short;
  const auto dtype = is_single || weight_is_bf16 ? ScalarType::Float : ScalarType::BFloat16;
  const int64_t together = is_single ? 1 : 2;
  check_shape("weight", weight, {kAny, kAny, 16, together});
  const int64_t size_in = together * weight.size(1), size_out = 16 * weight.size(0);
  if (size_in % 32) {
    fail("a multiple of 32 inputs", std::to_string(size_in), "leave such a layer as it is");
  }
  check_dense("weight", weight, {weight.size(0), weight.size(1), 16, together},
              weight_is_bf16 ? stored : dtype);
  check_shape("input", input, {kAny, size_in});
  check_dtype("input", input, dtype);
  check_rows("input", input);
  if (bias) check_dense("bias", *bias, {size_out}, dtype);

  PackedLinearArgs args{};
  args.rows = input.size(0), args.size_in = size_in, args.size_out = size_out;
  args.input = input.const_data_ptr(), args.input_row = input.stride(0);
  args.out_row = size_out;
  args.weight = weight.const_data_ptr();
  args.bias = bias ? bias->const_data_ptr() : nullptr;
  args.dtype = dtype == ScalarType::Float ? kFloat32 : kBFloat16;
  args.weight_is_bf16 = weight_is_bf16;
  return args;
}

inline Tensor room_for(const Tensor& input, PackedLinearArgs& layer) {
  Tensor out = torch::stable::new_empty(input, std::vector<int64_t>{layer.rows, layer.size_out});
  layer.out = out.mutable_data_ptr();
  return out;
}

// Uses the current tuning and number of threads.
inline void multiply(std::vector<PackedLinearArgs>& layers, bool is_swiglu) {
  for (auto& layer : layers) {
    layer.threads = int32_t(torch::stable::get_num_threads());
    layer.products = layer.weight_is_bf16 ? tuning.linear_bf16_weights : tuning.linear;
    layer.prefetch_l1 = tuning.linear_prefetch_l1;
    layer.prefetch_l1_once = tuning.linear_prefetch_l1_once;
  }
  const auto kernel = !layers.empty() && layers[0].quantised.codes
                          ? compiled_attn_quantised_linear
                          : compiled_attn_packed_linear;
  if (kernel(layers.data(), int64_t(layers.size()), is_swiglu) != kOk) {
    fail("scratch memory", "none", "free memory");
  }
}

inline void replay_linear(const int64_t* words) {
  const int64_t count = words[0], is_swiglu = words[1];
  words += 2;
  std::vector<PackedLinearArgs> layers;
  for (int64_t i = 0; i < count; ++i) layers.push_back(read_args<PackedLinearArgs>(words));
  in_op("a replayed layer", [&] { multiply(layers, is_swiglu); });
}

inline void multiply_and_record(std::vector<PackedLinearArgs>& layers, bool is_swiglu = false) {
  multiply(layers, is_swiglu);
  if (CallRecorder* recorder = CallRecorder::active()) {
    using A = PackedLinearArgs;
    recorder->begin(replay_linear), recorder->put(int64_t(layers.size())), recorder->put(is_swiglu);
    for (const auto& layer : layers)
      recorder->put(layer, {offsetof(A, input), offsetof(A, weight), offsetof(A, bias),
                            offsetof(A, out), offsetof(A, quantised.codes),
                            offsetof(A, quantised.scales), offsetof(A, quantised.steps)});
  }
}

// The outputs of each layer of one input.
inline std::vector<Tensor> multiply_all(const Tensor& input, std::vector<PackedLinearArgs> layers) {
  if (layers.empty()) fail("weights of at least one layer", "none", "pass them as a list");
  std::vector<Tensor> outs;
  for (auto& layer : layers) outs.push_back(room_for(input, layer));
  multiply_and_record(layers);
  return outs;
}

// silu(first) * second
inline Tensor multiply_swiglu(const Tensor& input, std::vector<PackedLinearArgs> layers) {
  if (layers.size() != 2)
    fail("the weights of gate and up", text(layers.size()), "pass [gate, up]");
  if (layers[0].size_out != layers[1].size_out)
    fail(text("as many outputs as the gate, ", layers[0].size_out), text(layers[1].size_out),
         "pass two layers of the same sizes");
  Tensor out = room_for(input, layers[0]);
  multiply_and_record(layers, true);
  return out;
}

inline Tensor packed_linear(Tensor input, Tensor weight, OptionalTensor bias) {
  return in_op("packed_linear", [&] {
    std::vector layers{layer_of(input, weight, bias ? &*bias : nullptr)};
    Tensor out = room_for(input, layers[0]);
    multiply_and_record(layers);
    return out;
  });
}

inline void check_one_each(const char* name, const std::vector<Tensor>& of,
                           const std::vector<Tensor>& weights) {
  if (of.empty() || of.size() == weights.size()) return;
  fail(text(name, " of all weights or of none"), text(of.size(), " for ", weights.size()),
       "call the op for the others apart");
}

inline std::vector<PackedLinearArgs> layers_of(const Tensor& input,
                                               const std::vector<Tensor>& weights,
                                               const std::vector<Tensor>& biases) {
  check_one_each("biases", biases, weights);
  std::vector<PackedLinearArgs> layers;
  for (size_t i = 0; i < weights.size(); ++i) {
    check_dtype("weights", weights[i], weights[0].scalar_type());  // one inner loop serves all
    layers.push_back(layer_of(input, weights[i], biases.empty() ? nullptr : &biases[i]));
  }
  return layers;
}

inline std::vector<Tensor> packed_linears(Tensor input, std::vector<Tensor> weights,
                                          std::vector<Tensor> biases) {
  return in_op("packed_linears",
               [&] { return multiply_all(input, layers_of(input, weights, biases)); });
}

inline Tensor packed_swiglu(Tensor input, std::vector<Tensor> weights, std::vector<Tensor> biases) {
  return in_op("packed_swiglu",
               [&] { return multiply_swiglu(input, layers_of(input, weights, biases)); });
}

inline void check_row(int64_t id, int64_t rows) {
  if (id >= 0 && id < rows) return;
  fail(text("ids in 0..", rows - 1), std::to_string(id), "look up rows of the weight");
}

inline void look_up(const PackedRowsArgs& args) {
  int64_t bad = 0;
  if (!copy_packed_rows(args, bad)) check_row(bad, args.panels * kRowsOfPanel);
}

inline void replay_rows(const int64_t* words) {
  const auto args = read_args<PackedRowsArgs>(words);
  in_op("packed_rows", [&] { look_up(args); });
}

inline Tensor packed_rows(Tensor weight, Tensor ids) {
  return in_op("packed_rows", [&] {
    const auto dtype = weight.scalar_type();
    const bool weight_is_bf16 = dtype == ScalarType::Short;
    const bool is_known = weight_is_bf16 || dtype == ScalarType::Float;
    const int64_t together = dtype == ScalarType::Float ? 1 : 2;
    check_shape("weight", weight, {kAny, kAny, kRowsOfPanel, together});
    const int64_t panels = weight.size(0), groups = weight.size(1), count = ids.numel();
    check_dense("weight", weight, {panels, groups, kRowsOfPanel, together},
                is_known ? dtype : ScalarType::BFloat16);
    check_dense("ids", ids, {count}, ScalarType::Long);
    std::vector<int64_t> shape{count, together * groups};
    const auto out_dtype = weight_is_bf16 ? ScalarType::Float : dtype;
    Tensor out = torch::stable::new_empty(weight, shape, out_dtype);
    PackedRowsArgs args{};
    args.weight = weight.const_data_ptr(), args.ids = data_of<int64_t>(ids);
    args.out = out.mutable_data_ptr(), args.count = count, args.panels = panels;
    args.groups = groups, args.weight_is_bf16 = weight_is_bf16;
    look_up(args);
    if (CallRecorder* recorder = CallRecorder::active()) {
      using A = PackedRowsArgs;
      recorder->begin(replay_rows);
      recorder->put(args, {offsetof(A, weight), offsetof(A, ids), offsetof(A, out)});
    }
    return out;
  });
}

}  // namespace compiled_attn
