// The op `add_lora`.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <vector>

#include "arguments.h"
#include "replay.h"

namespace compiled_attn {

constexpr int64_t kMaxRank = 1024;

inline void replay_add_lora(const int64_t* words) {
  const auto args = read_args<AddLoraArgs>(words);
  compiled_attn_add_lora(&args);
}

inline Tensor add_lora(Tensor out, Tensor input, Tensor a, Tensor b, Tensor scale, Tensor ranks,
                       Tensor slots) {
  return in_op("add_lora", [&] {
    check_shape("out", out, {kAny, kAny});
    const int64_t rows = out.size(0), size_out = out.size(1);
    check_shape("a", a, {kAny, kAny, kAny});
    const int64_t count = a.size(0), rank = a.size(1), size_in = a.size(2);
    if (rank > kMaxRank)
      fail(text("a rank of at most ", kMaxRank), text(rank), "merge such an adapter");
    const auto dtype = out.scalar_type() == ScalarType::Float ? ScalarType::Float
                                                              : ScalarType::BFloat16;
    check_dense("out", out, {rows, size_out}, dtype);
    check_shape("input", input, {rows, size_in});
    check_dtype("input", input, dtype);
    check_rows("input", input);
    check_dense("a", a, {count, rank, size_in}, dtype);
    check_dense("b", b, {count, rank, size_out}, dtype);
    check_dense("scale", scale, {count}, ScalarType::Float);
    check_dense("ranks", ranks, {count}, ScalarType::Int);
    check_dense("slots", slots, {slots.numel()}, ScalarType::Int);
    if (slots.numel() < rows)
      fail(text("a slot of each of ", rows, " rows"), text(slots.numel()), "make the buffer larger");

    Tensor result = torch::stable::new_empty(out, std::vector<int64_t>{rows, size_out});
    AddLoraArgs args{};
    args.out = out.const_data_ptr(), args.input = input.const_data_ptr();
    args.a = a.const_data_ptr(), args.b = b.const_data_ptr();
    args.scale = data_of<float>(scale), args.ranks = data_of<int32_t>(ranks);
    args.slot_of = data_of<int32_t>(slots), args.result = result.mutable_data_ptr();
    args.rows = rows, args.input_row = input.stride(0);
    args.size_in = size_in, args.size_out = size_out, args.max_rank = rank;
    args.dtype = dtype == ScalarType::Float ? kFloat32 : kBFloat16;
    args.threads = int32_t(torch::stable::get_num_threads());
    compiled_attn_add_lora(&args);
    if (CallRecorder* recorder = CallRecorder::active()) {
      using A = AddLoraArgs;
      recorder->begin(replay_add_lora);
      recorder->put(args, {offsetof(A, out), offsetof(A, input), offsetof(A, a), offsetof(A, b),
                           offsetof(A, scale), offsetof(A, ranks), offsetof(A, slot_of),
                           offsetof(A, result)});
    }
    return result;
  });
}

}  // namespace compiled_attn
