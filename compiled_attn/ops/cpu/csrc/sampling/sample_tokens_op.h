// The op `sample_tokens`.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <vector>

#include "arguments.h"

namespace compiled_attn {

inline Tensor sample_tokens(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p,
                           Tensor min_p, Tensor uniform) {
  return in_op("sample_tokens", [&] {
    check_shape("logits", logits, {kAny, kAny});
    check_rows("logits", logits);
    const int64_t rows = logits.size(0), vocab = logits.size(1);
    const auto dtype = dtype_code(logits.scalar_type());
    if (!dtype || is_quantised(*dtype)) {
      fail("logits of Float, BFloat16 or Half", torch::headeronly::toString(logits.scalar_type()),
           "convert them with .to()");
    }
    if (vocab < 1 || vocab > INT32_MAX) {
      fail("a vocabulary of 1..2147483647", std::to_string(vocab), "sample tokens of a model");
    }
    check_dense("top_k", top_k, {rows}, ScalarType::Long);
    for (auto [name, each] : {std::pair{"temperature", &temperature},
                              {"top_p", &top_p},
                              {"min_p", &min_p},
                              {"uniform", &uniform}})
      check_dense(name, *each, {rows}, ScalarType::Double);

    Tensor tokens = torch::stable::new_empty(top_k, std::vector<int64_t>{rows});
    SampleTokensArgs args{};
    args.logits = logits.const_data_ptr(), args.logits_row = logits.stride(0);
    args.temperature = data_of<double>(temperature), args.top_k = data_of<int64_t>(top_k);
    args.top_p = data_of<double>(top_p), args.min_p = data_of<double>(min_p);
    args.uniform = data_of<double>(uniform);
    args.tokens = static_cast<int64_t*>(tokens.mutable_data_ptr());
    args.rows = rows, args.vocab = vocab, args.dtype = *dtype;
    args.threads = int32_t(torch::stable::get_num_threads());
    if (compiled_attn_sample_tokens(&args) != kOk) fail("scratch memory", "none", "free memory");
    return tokens;
  });
}

}  // namespace compiled_attn
