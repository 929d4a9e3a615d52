// The ops `quantised_linear`, `quantised_linears`, `quantised_swiglu` and `quantised_rows`.
#pragma once

#include <vector>

#include "linear/linear_ops.h"

namespace compiled_attn {

// Describes a weight; `codes` [panels, blocks, 64 * bits], `scales` [panels, groups, (2,) 16],
// `steps` empty or [panels, groups, (2,) 16], see `GroupKind`.
inline QuantisedWeight quantised_weight(const Tensor& codes, const Tensor& scales,
                                        const Tensor& steps) {
  check_shape("codes", codes, {kAny, kAny, kAny});
  const int64_t panels = codes.size(0), blocks = codes.size(1), bits = codes.size(2) / 64;
  if (codes.size(2) % 64 || bits < 4 || bits == 7 || bits > 8)
    fail("codes of 4, 5, 6 or 8 bits: 64 bytes a block for each", text(codes.size(2), " bytes"),
         "pack them with QuantisedWeight");
  check_dense("codes", codes, {panels, blocks, 64 * bits}, ScalarType::Byte);
  QuantisedWeight weight{};
  weight.codes = data_of<uint8_t>(codes), weight.bits = int32_t(bits);
  weight.scales = scales.const_data_ptr();
  weight.scales_are_float32 = scales.scalar_type() == ScalarType::Float;

  // Groups along the inputs must divide them into multiples of 16, and blocks.
  const auto groups_of = [&](const char* name, const Tensor& of, bool two, ScalarType dtype) {
    const int64_t groups = of.dim() > 1 ? of.size(1) : 0;
    if (two)
      check_dense(name, of, {panels, groups, 2, kRowsOfPanel}, dtype);
    else
      check_dense(name, of, {panels, groups, kRowsOfPanel}, dtype);
    if (groups < 1 || (blocks % groups && groups != 2 * blocks))
      fail(text(name, " of groups of 16, or of whole blocks of 32 inputs of ", 32 * blocks),
           text(groups, " groups"), "keep such a layer in 16 bits");
    return groups;
  };
  const bool two = scales.dim() == 4, has_steps = steps.numel() > 0;
  weight.scale_groups =
      groups_of("scales", scales, two,
                weight.scales_are_float32 ? ScalarType::Float : ScalarType::Half);
  if (has_steps) {
    const bool is_zero = !two && steps.scalar_type() == ScalarType::Byte;
    weight.kind = two ? kSuperBoth : is_zero ? kScaleZero : kSuperScale;
    weight.steps = data_of<uint8_t>(steps);
    weight.step_groups =
        groups_of("steps", steps, two, two || is_zero ? ScalarType::Byte : ScalarType::Char);
    if (weight.step_groups % weight.scale_groups)
      fail(text("steps that divide the ", weight.scale_groups, " groups of scales"),
           text(weight.step_groups), "pack it with QuantisedWeight");
  } else {
    weight.kind = two ? kScaleMinimum : kScale;
  }
  return weight;
}

inline PackedLinearArgs quantised_layer(const Tensor& input, const Tensor& codes,
                                        const Tensor& scales, const Tensor& steps,
                                        const Tensor* bias, bool int8_inputs) {
  PackedLinearArgs layer{};
  layer.quantised = quantised_weight(codes, scales, steps);
  layer.quantised.int8_inputs = int8_inputs;
  layer.size_in = 32 * codes.size(1), layer.size_out = kRowsOfPanel * codes.size(0);
  const bool is_single = input.scalar_type() == ScalarType::Float;
  const auto dtype = is_single ? ScalarType::Float : ScalarType::BFloat16;
  check_shape("input", input, {kAny, layer.size_in});
  check_dtype("input", input, dtype);
  check_rows("input", input);
  if (bias) check_dense("bias", *bias, {layer.size_out}, dtype);
  layer.rows = input.size(0), layer.input = input.const_data_ptr();
  layer.input_row = input.stride(0), layer.out_row = layer.size_out;
  layer.bias = bias ? bias->const_data_ptr() : nullptr;
  layer.dtype = is_single ? kFloat32 : kBFloat16;
  return layer;
}

using Tensors = std::vector<Tensor>;

inline std::vector<PackedLinearArgs> quantised_layers(const Tensor& input, const Tensors& codes,
                                                      const Tensors& scales, const Tensors& steps,
                                                      const Tensors& biases, bool int8_inputs) {
  if (scales.size() != codes.size() || steps.size() != codes.size())
    fail("scales and steps of each layer", text(scales.size(), " and ", steps.size()),
         "pass empty steps for layers without");
  check_one_each("biases", biases, codes);
  std::vector<PackedLinearArgs> layers;
  for (size_t i = 0; i < codes.size(); ++i)
    layers.push_back(quantised_layer(input, codes[i], scales[i], steps[i],
                                     biases.empty() ? nullptr : &biases[i], int8_inputs));
  return layers;
}

inline Tensor quantised_linear(Tensor input, Tensor codes, Tensor scales, Tensor steps,
                               OptionalTensor bias, bool int8_inputs) {
  return in_op("quantised_linear", [&] {
    return multiply_all(input, {quantised_layer(input, codes, scales, steps,
                                                bias ? &*bias : nullptr, int8_inputs)})[0];
  });
}

inline Tensors quantised_linears(Tensor input, Tensors codes, Tensors scales, Tensors steps,
                                 Tensors biases, bool int8_inputs) {
  return in_op("quantised_linears", [&] {
    return multiply_all(input, quantised_layers(input, codes, scales, steps, biases, int8_inputs));
  });
}

inline Tensor quantised_swiglu(Tensor input, Tensors codes, Tensors scales, Tensors steps,
                               Tensors biases, bool int8_inputs) {
  return in_op("quantised_swiglu", [&] {
    return multiply_swiglu(input,
                           quantised_layers(input, codes, scales, steps, biases, int8_inputs));
  });
}

inline void look_up(const QuantisedRowsArgs& args) {
  for (int64_t i = 0; i < args.count; ++i) check_row(args.ids[i], args.size_out);
  compiled_attn_quantised_rows(&args);
}

inline void replay_quantised_rows(const int64_t* words) {
  const auto args = read_args<QuantisedRowsArgs>(words);
  in_op("quantised_rows", [&] { look_up(args); });
}

inline Tensor quantised_rows(Tensor codes, Tensor scales, Tensor steps, Tensor ids,
                             bool as_bfloat16) {
  return in_op("quantised_rows", [&] {
    QuantisedRowsArgs args{};
    args.weight = quantised_weight(codes, scales, steps);
    args.count = ids.numel(), args.size_in = 32 * codes.size(1);
    args.size_out = kRowsOfPanel * codes.size(0), args.as_bfloat16 = as_bfloat16;
    check_dense("ids", ids, {args.count}, ScalarType::Long);
    args.ids = data_of<int64_t>(ids);
    Tensor out = torch::stable::new_empty(codes, std::vector<int64_t>{args.count, args.size_in},
                                          as_bfloat16 ? ScalarType::BFloat16 : ScalarType::Float);
    args.out = out.mutable_data_ptr();
    look_up(args);
    if (CallRecorder* recorder = CallRecorder::active()) {
      using A = QuantisedRowsArgs;
      recorder->begin(replay_quantised_rows);
      recorder->put(args, {offsetof(A, weight.codes), offsetof(A, weight.scales),
                           offsetof(A, weight.steps), offsetof(A, ids), offsetof(A, out)});
    }
    return out;
  });
}

}  // namespace compiled_attn
