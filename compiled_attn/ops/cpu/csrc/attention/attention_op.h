// The ops `paged_attention` and `paged_attention_`.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <tuple>
#include <vector>

#include "arguments.h"
#include "replay.h"

namespace compiled_attn {

using Result = std::tuple<Tensor, Tensor>;

// Options of both ops.
struct Options {
  bool causal;
  std::optional<int64_t> window;
  std::optional<double> softcap;
  OptionalTensor alibi_slopes, sinks, key_scale, value_scale;
  std::optional<int64_t> segment;
};

inline Rows rows_of(const Tensor& tensor) {
  return {tensor.const_data_ptr(), tensor.stride(0), tensor.stride(1)};
}

inline Pages pages_of(const Tensor& cache) {
  // The cast drops const; only caches declared mutable are written.
  return {const_cast<void*>(cache.const_data_ptr()), cache.stride(0), cache.stride(1),
          cache.stride(2)};
}

inline Pages pages_of(const OptionalTensor& scale) { return scale ? pages_of(*scale) : Pages{}; }

inline void check_cache(const char* name, const Tensor& cache, ScalarType expected) {
  check_dtype(name, cache, expected);
  check_rows(name, cache);
}

inline void check_scale(const char* name, const OptionalTensor& scale, const Tensor& cache,
                        bool quantised) {
  if (scale.has_value() != quantised) {
    fail(text(name, quantised ? " for an int8 or fp8 cache" : ": None for a float cache"),
         scale ? "a tensor" : "None", "scales belong to int8 and fp8 caches, and to no others");
  }
  if (!scale) return;
  check_shape(name, *scale, {cache.size(0), cache.size(1), cache.size(2)});
  check_dtype(name, *scale, ScalarType::Float);
}

inline void check_options(const Options& options, int64_t heads) {
  if (options.window && *options.window < 1) {
    fail("window of at least 1", std::to_string(*options.window), "None is no window");
  }
  if (options.window && !options.causal) {
    fail("window with causal", "causal=False", "leave one of them out");
  }
  if (options.segment && (*options.segment < 1 || *options.segment % kSegmentUnit)) {
    fail(text("segment of a multiple of ", kSegmentUnit), std::to_string(*options.segment),
         "None is no segment");
  }
  if (options.softcap && !(*options.softcap > 0)) {
    fail("a positive softcap or None", std::to_string(*options.softcap), "None is no softcap");
  }
  if (options.alibi_slopes) {
    check_dense("alibi_slopes", *options.alibi_slopes, {heads}, ScalarType::Float);
  }
  if (options.sinks) check_dense("sinks", *options.sinks, {heads}, ScalarType::Float);
}

inline PagedAttentionArgs arguments_of(const Tensor& query, const Tensor& key_cache,
                                       const Tensor& value_cache, const Tensor& block_table,
                                       const Tensor& seq_lens, const Tensor& query_start_loc,
                                       double scale, const Options& options) {
  check_shape("query", query, {kAny, kAny, kAny});
  check_shape("key_cache", key_cache, {kAny, kAny, kAny, query.size(2)});
  int64_t heads = query.size(1), kv_heads = key_cache.size(2);
  if (heads < 1 || kv_heads < 1 || heads % kv_heads) {
    fail("H to be a multiple of Hk", text(heads, " and ", kv_heads),
         "check the heads of the cache");
  }
  check_shape("value_cache", value_cache, {key_cache.size(0), key_cache.size(1), kv_heads, kAny});
  if (query.size(2) < 1 || value_cache.size(3) < 1 || key_cache.size(1) < 1) {
    fail("heads and blocks of at least one element", list(key_cache.sizes()), "give them a size");
  }
  auto query_dtype = dtype_code(query.scalar_type()),
       cache_dtype = dtype_code(key_cache.scalar_type());
  if (!query_dtype || is_quantised(*query_dtype)) {
    fail("query: float32, bfloat16 or float16", torch::headeronly::toString(query.scalar_type()),
         "convert it with .to()");
  }
  bool quantised = cache_dtype && is_quantised(*cache_dtype);
  ScalarType expected = quantised ? key_cache.scalar_type() : query.scalar_type();
  check_rows("query", query);
  check_cache("key_cache", key_cache, expected);
  check_cache("value_cache", value_cache, expected);
  check_scale("key_scale", options.key_scale, key_cache, quantised);
  check_scale("value_scale", options.value_scale, value_cache, quantised);
  check_shape("block_table", block_table, {kAny, kAny});
  check_dtype("block_table", block_table, ScalarType::Int);
  check_rows("block_table", block_table);
  int64_t requests = block_table.size(0);
  check_dense("seq_lens", seq_lens, {requests}, ScalarType::Int);
  check_dense("query_start_loc", query_start_loc, {requests + 1}, ScalarType::Int);
  check_options(options, heads);

  PagedAttentionArgs args{};
  args.query = rows_of(query);
  args.key_cache = pages_of(key_cache);
  args.value_cache = pages_of(value_cache);
  args.key_scale = pages_of(options.key_scale);
  args.value_scale = pages_of(options.value_scale);
  args.block_table = data_of<int32_t>(block_table);
  args.table_stride = block_table.stride(0);
  args.seq_lens = data_of<int32_t>(seq_lens);
  args.query_start_loc = data_of<int32_t>(query_start_loc);
  args.alibi_slopes = floats_of(options.alibi_slopes);
  args.sinks = floats_of(options.sinks);
  args.tokens = query.size(0);
  args.requests = requests;
  args.table_width = block_table.size(1);
  args.num_blocks = key_cache.size(0);
  args.block_size = key_cache.size(1);
  args.heads = heads;
  args.kv_heads = kv_heads;
  args.head_dim = query.size(2);
  args.value_dim = value_cache.size(3);
  args.window = options.window.value_or(0);
  args.segment = options.segment.value_or(0);
  args.scale = scale;
  args.softcap = options.softcap.value_or(0.0);
  args.query_dtype = *query_dtype;
  args.cache_dtype = *cache_dtype;
  args.causal = options.causal;
  return args;
}

// Throws the error for a status, worded as the Python reference words it.
[[noreturn]] inline void explain(int32_t status, const int64_t error[4],
                                 const PagedAttentionArgs& args) {
  switch (status) {
    case kBadOffsets:
      fail(text("query rows of request ", error[0], " in 0..", args.tokens, ", in order"),
           text(error[1], "..", error[2]),
           "query_start_loc is a running sum that ends at the tokens of the step");
    case kBadLength:
      fail(text("seq_lens[", error[0], "] in 0..", args.table_width * args.block_size, " (",
                args.table_width, " blocks of ", args.block_size, ")"),
           std::to_string(error[1]), "widen the block table");
    case kBadBlock:
      fail(text("block_table[", error[0], ", ", error[1], "] in 0..", args.num_blocks - 1),
           std::to_string(error[2]), "the request needs it: give it a block of the cache");
    case kBadSlot:
      fail(text("slot_mapping[", error[0], "] in 0..", args.num_blocks * args.block_size - 1),
           std::to_string(error[1]), "padding points into block 0");
    case kOutOfMemory:
      fail("scratch memory", "none", "free memory");
    case kNoKernel:
      fail(text("the kernels of ", error[0], "-bit caches in this library or next to it, in NAME-",
                error[0], "bit.so"),
           "none", "see the log, or build them by compiled_attn.ops.load(cache_dtype=...)");
    default:
      fail("a known status", std::to_string(status), "report this");
  }
}

// Uses the current tuning and number of threads.
inline void attend(PagedAttentionArgs& args) {
  args.threads = int32_t(torch::stable::get_num_threads());
  args.tuning = tuning;
  int64_t error[4] = {};
  const int32_t status = compiled_attn_paged_attention(&args, error);
  if (status != kOk) explain(status, error, args);
}

inline void replay_attention(const int64_t* words) {
  auto args = read_args<PagedAttentionArgs>(words);
  in_op("paged_attention", [&] { attend(args); });
}

inline void record(const PagedAttentionArgs& args) {
  if (CallRecorder* recorder = CallRecorder::active()) {
    recorder->begin(replay_attention);
    recorder->put(args, kPagedAttentionAddresses);
  }
}

inline Result run(PagedAttentionArgs& args, const Tensor& query) {
  std::vector<int64_t> out_shape{args.tokens, args.heads, args.value_dim};
  std::vector<int64_t> lse_shape{args.tokens, args.heads};
  Tensor out = torch::stable::new_empty(query, out_shape);
  Tensor lse = torch::stable::new_empty(query, lse_shape, ScalarType::Float);
  args.out = out.mutable_data_ptr();
  args.lse = static_cast<float*>(lse.mutable_data_ptr());
  attend(args);
  record(args);
  return {out, lse};
}

inline Result paged_attention(Tensor query, Tensor key_cache, Tensor value_cache,
                              Tensor block_table, Tensor seq_lens, Tensor query_start_loc,
                              double scale, bool causal, std::optional<int64_t> window,
                              std::optional<double> softcap, OptionalTensor alibi_slopes,
                              OptionalTensor sinks, OptionalTensor key_scale,
                              OptionalTensor value_scale, std::optional<int64_t> segment) {
  return in_op("paged_attention", [&] {
    Options options{causal, window, softcap, alibi_slopes, sinks, key_scale, value_scale,
                    segment};
    auto args = arguments_of(query, key_cache, value_cache, block_table, seq_lens, query_start_loc,
                             scale, options);
    return run(args, query);
  });
}

inline Result paged_attention_(Tensor query, Tensor key, Tensor value, Tensor key_cache,
                               Tensor value_cache, Tensor slot_mapping, Tensor block_table,
                               Tensor seq_lens, Tensor query_start_loc, double scale, bool causal,
                               std::optional<int64_t> window, std::optional<double> softcap,
                               OptionalTensor alibi_slopes, OptionalTensor sinks,
                               OptionalTensor key_scale, OptionalTensor value_scale,
                               std::optional<int64_t> segment) {
  return in_op("paged_attention", [&] {
    Options options{causal, window, softcap, alibi_slopes, sinks, key_scale, value_scale,
                    segment};
    auto args = arguments_of(query, key_cache, value_cache, block_table, seq_lens, query_start_loc,
                             scale, options);
    check_shape("key", key, {args.tokens, args.kv_heads, args.head_dim});
    check_shape("value", value, {args.tokens, args.kv_heads, args.value_dim});
    for (auto [name, rows] : {std::pair{"key", &key}, std::pair{"value", &value}}) {
      check_dtype(name, *rows, query.scalar_type());
      check_rows(name, *rows);
    }
    check_dense("slot_mapping", slot_mapping, {args.tokens}, ScalarType::Long);
    check_written("key_cache", key_cache);
    check_written("value_cache", value_cache);
    if (key_scale) check_written("key_scale", *key_scale);
    if (value_scale) check_written("value_scale", *value_scale);
    check_apart({{"query", query},
                 {"key", key},
                 {"value", value},
                 {"slot_mapping", slot_mapping},
                 {"block_table", block_table},
                 {"seq_lens", seq_lens},
                 {"query_start_loc", query_start_loc}},
                {{"key_cache", key_cache},
                 {"value_cache", value_cache},
                 {"key_scale", key_scale},
                 {"value_scale", value_scale}});
    args.key = rows_of(key);
    args.value = rows_of(value);
    args.slot_mapping = data_of<int64_t>(slot_mapping);
    return run(args, query);
  });
}

}  // namespace compiled_attn
