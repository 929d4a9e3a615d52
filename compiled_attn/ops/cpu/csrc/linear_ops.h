// The ops `packed_linear`, `packed_linears`, `packed_gated` and `packed_rows`.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <vector>

#include "op_arguments.h"
#include "packed_rows.h"
#include "tape.h"

namespace compiled_attn {

// A layer without room for its output.
inline PackedLinearArgs layer_of(const Tensor& input, const Tensor& weight, const Tensor* bias,
                                 const Tensor* scale) {
  const auto kept = weight.scalar_type();
  const bool is_single = !scale && kept == ScalarType::Float;
  const bool is_halves = !scale && kept == ScalarType::Short;
  const auto dtype = is_single || is_halves ? ScalarType::Float : ScalarType::BFloat16;
  const int64_t together = is_single ? 1 : 2;
  check_shape("weight", weight, {kAny, kAny, 16, together});
  const int64_t size_in = together * weight.size(1), size_out = 16 * weight.size(0);
  if (size_in % 32) {
    fail("a multiple of 32 inputs", std::to_string(size_in), "leave such a layer as it is");
  }
  check_dense("weight", weight, {weight.size(0), weight.size(1), 16, together},
              scale       ? ScalarType::Char
              : is_halves ? kept
                          : dtype);
  if (scale) check_dense("scale", *scale, {size_out}, ScalarType::Float);
  check_shape("input", input, {kAny, size_in});
  check_dtype("input", input, dtype);
  check_rows("input", input);
  if (bias) check_dense("bias", *bias, {size_out}, dtype);

  PackedLinearArgs args{};
  args.rows = input.size(0), args.size_in = size_in, args.size_out = size_out;
  args.input = input.const_data_ptr(), args.input_row = input.stride(0);
  args.out_row = size_out;
  args.weight = weight.const_data_ptr();
  args.scale = scale ? data_of<float>(*scale) : nullptr;
  args.bias = bias ? bias->const_data_ptr() : nullptr;
  args.dtype = dtype == ScalarType::Float ? kFloat32 : kBFloat16;
  args.is_halves = is_halves;
  return args;
}

inline Tensor room_for(const Tensor& input, PackedLinearArgs& layer) {
  Tensor out = torch::stable::new_empty(input, std::vector<int64_t>{layer.rows, layer.size_out});
  layer.out = out.mutable_data_ptr();
  return out;
}

// As is measured to be fastest, on the threads of this moment.
inline void multiply(std::vector<PackedLinearArgs>& layers, bool is_gated) {
  for (auto& layer : layers) {
    layer.threads = int32_t(torch::stable::get_num_threads());
    layer.products = layer.is_halves ? forms.linear_halves : forms.linear;
    layer.asks_near = forms.linear_near, layer.asks_near_once = forms.linear_near_once;
  }
  if (compiled_attn_packed_linear(layers.data(), int64_t(layers.size()), is_gated) != kOk) {
    fail("scratch memory", "none", "free memory");
  }
}

inline void play_linear(const int64_t* words) {
  const int64_t count = words[0], is_gated = words[1];
  words += 2;
  std::vector<PackedLinearArgs> layers;
  for (int64_t i = 0; i < count; ++i) layers.push_back(taken<PackedLinearArgs>(words));
  in_op(is_gated    ? "packed_gated"
        : count > 1 ? "packed_linears"
                    : "packed_linear",
        [&] { multiply(layers, is_gated); });
}

inline void multiply_and_note(std::vector<PackedLinearArgs>& layers, bool is_gated = false) {
  multiply(layers, is_gated);
  if (Notes* notes = Notes::wanted()) {
    using A = PackedLinearArgs;
    notes->begin(play_linear), notes->put(int64_t(layers.size())), notes->put(is_gated);
    for (const auto& layer : layers)
      notes->put(layer, {offsetof(A, input), offsetof(A, weight), offsetof(A, scale),
                         offsetof(A, bias), offsetof(A, out)});
  }
}

inline Tensor packed_linear(Tensor input, Tensor weight, Maybe bias, Maybe scale) {
  return in_op("packed_linear", [&] {
    std::vector layers{layer_of(input, weight, bias ? &*bias : nullptr, scale ? &*scale : nullptr)};
    Tensor out = room_for(input, layers[0]);
    multiply_and_note(layers);
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
                                               const std::vector<Tensor>& biases,
                                               const std::vector<Tensor>& scales) {
  check_one_each("biases", biases, weights);
  check_one_each("scales", scales, weights);
  std::vector<PackedLinearArgs> layers;
  for (size_t i = 0; i < weights.size(); ++i) {
    check_dtype("weights", weights[i], weights[0].scalar_type());  // one loop for all
    layers.push_back(layer_of(input, weights[i], biases.empty() ? nullptr : &biases[i],
                              scales.empty() ? nullptr : &scales[i]));
  }
  return layers;
}

inline std::vector<Tensor> packed_linears(Tensor input, std::vector<Tensor> weights,
                                          std::vector<Tensor> biases, std::vector<Tensor> scales) {
  return in_op("packed_linears", [&] {
    if (weights.empty()) fail("weights of at least one layer", "none", "pass them as a list");
    auto layers = layers_of(input, weights, biases, scales);
    std::vector<Tensor> outs;
    for (auto& layer : layers) outs.push_back(room_for(input, layer));
    multiply_and_note(layers);
    return outs;
  });
}

inline Tensor packed_gated(Tensor input, std::vector<Tensor> weights, std::vector<Tensor> biases,
                           std::vector<Tensor> scales) {
  return in_op("packed_gated", [&] {
    if (weights.size() != 2)
      fail("weights of two layers", text(weights.size()), "pass the gate, then what it is for");
    auto layers = layers_of(input, weights, biases, scales);
    if (layers[0].size_out != layers[1].size_out)
      fail(text("as many outputs as the gate, ", layers[0].size_out), text(layers[1].size_out),
           "pass two layers of the same sizes");
    Tensor out = room_for(input, layers[0]);
    multiply_and_note(layers, true);
    return out;
  });
}

inline void look_up(const PackedRowsArgs& args) {
  int64_t bad = 0;
  if (take_packed_rows(args, bad)) return;
  fail(text("ids in 0..", args.panels * kRowsOfPanel - 1), std::to_string(bad),
       "look up rows of the weight");
}

inline void play_rows(const int64_t* words) {
  const auto args = taken<PackedRowsArgs>(words);
  in_op("packed_rows", [&] { look_up(args); });
}

inline Tensor packed_rows(Tensor weight, Tensor ids) {
  return in_op("packed_rows", [&] {
    const auto dtype = weight.scalar_type();
    const bool is_halves = dtype == ScalarType::Short;
    const bool is_known = is_halves || dtype == ScalarType::Char || dtype == ScalarType::Float;
    const int64_t together = dtype == ScalarType::Float ? 1 : 2;
    check_shape("weight", weight, {kAny, kAny, kRowsOfPanel, together});
    const int64_t panels = weight.size(0), groups = weight.size(1), count = ids.numel();
    check_dense("weight", weight, {panels, groups, kRowsOfPanel, together},
                is_known ? dtype : ScalarType::BFloat16);
    check_dense("ids", ids, {count}, ScalarType::Long);
    std::vector<int64_t> shape{count, together * groups};
    Tensor out = torch::stable::new_empty(weight, shape, is_halves ? ScalarType::Float : dtype);
    PackedRowsArgs args{};
    args.weight = weight.const_data_ptr(), args.ids = data_of<int64_t>(ids);
    args.out = out.mutable_data_ptr(), args.count = count, args.panels = panels;
    args.groups = groups, args.bytes = together * weight.element_size();
    args.is_halves = is_halves;
    look_up(args);
    if (Notes* notes = Notes::wanted()) {
      using A = PackedRowsArgs;
      notes->begin(play_rows);
      notes->put(args, {offsetof(A, weight), offsetof(A, ids), offsetof(A, out)});
    }
    return out;
  });
}

}  // namespace compiled_attn
