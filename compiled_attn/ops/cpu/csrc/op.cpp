// The ops through torch's stable ABI: no Python, no ATen.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <tuple>
#include <vector>

#include "abi.h"
#include "arguments.h"
#include "packed_rows.h"
#include "schema.h"
#include "tape.h"

#ifndef COMPILED_ATTN_NAMESPACE
#define COMPILED_ATTN_NAMESPACE compiled_attn
#endif

namespace compiled_attn {
namespace {

using Maybe = std::optional<Tensor>;
using Result = std::tuple<Tensor, Tensor>;

// Of this process, for all calls; set before any.
Forms forms;

// Options that both ops have.
struct Options {
  bool causal;
  std::optional<int64_t> window;
  std::optional<double> softcap;
  Maybe alibi_slopes, sinks, key_scale, value_scale;
};

Rows rows_of(const Tensor& tensor) {
  return {tensor.const_data_ptr(), tensor.stride(0), tensor.stride(1)};
}

Pages pages_of(const Tensor& cache) {
  // Caches that an op does not declare mutable are only read.
  return {const_cast<void*>(cache.const_data_ptr()), cache.stride(0), cache.stride(1),
          cache.stride(2)};
}

Pages pages_of(const Maybe& scale) { return scale ? pages_of(*scale) : Pages{}; }

template <typename T>
const T* data_of(const Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}

const float* floats_of(const Maybe& tensor) { return tensor ? data_of<float>(*tensor) : nullptr; }

void check_cache(const char* name, const Tensor& cache, ScalarType wanted) {
  check_dtype(name, cache, wanted);
  check_rows(name, cache);
}

void check_scale(const char* name, const Maybe& scale, const Tensor& cache, bool quantised) {
  if (scale.has_value() != quantised) {
    fail(text(name, quantised ? " for an int8 or fp8 cache" : ": None for a float cache"),
         scale ? "a tensor" : "None", "scales belong to int8 and fp8 caches, and to no others");
  }
  if (!scale) return;
  check_shape(name, *scale, {cache.size(0), cache.size(1), cache.size(2)});
  check_dtype(name, *scale, ScalarType::Float);
}

void check_options(const Options& options, int64_t heads) {
  if (options.window && *options.window < 1) {
    fail("window of at least 1", std::to_string(*options.window), "None is no window");
  }
  if (options.window && !options.causal) {
    fail("window with causal", "causal=False", "leave one of them out");
  }
  if (options.softcap && !(*options.softcap > 0)) {
    fail("a positive softcap or None", std::to_string(*options.softcap), "None is no softcap");
  }
  if (options.alibi_slopes) {
    check_dense("alibi_slopes", *options.alibi_slopes, {heads}, ScalarType::Float);
  }
  if (options.sinks) check_dense("sinks", *options.sinks, {heads}, ScalarType::Float);
}

PagedAttentionArgs arguments_of(const Tensor& query, const Tensor& key_cache,
                                const Tensor& value_cache, const Tensor& block_table,
                                const Tensor& seq_lens, const Tensor& query_start_loc, double scale,
                                const Options& options) {
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
  ScalarType wanted = quantised ? key_cache.scalar_type() : query.scalar_type();
  check_rows("query", query);
  check_cache("key_cache", key_cache, wanted);
  check_cache("value_cache", value_cache, wanted);
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
  args.scale = scale;
  args.softcap = options.softcap.value_or(0.0);
  args.query_dtype = *query_dtype;
  args.cache_dtype = *cache_dtype;
  args.causal = options.causal;
  return args;
}

// What the kernel found in the tensors, as the Python reference would say it.
[[noreturn]] void explain(int32_t status, const int64_t error[4], const PagedAttentionArgs& args) {
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
    default:
      fail("a known status", std::to_string(status), "report this");
  }
}

// As is measured to be fastest, on the threads of this moment.
void attend(PagedAttentionArgs& args) {
  args.threads = int32_t(torch::stable::get_num_threads());
  args.forms = forms;
  int64_t error[4] = {};
  const int32_t status = compiled_attn_paged_attention(&args, error);
  if (status != kOk) explain(status, error, args);
}

void play_attention(const int64_t* words) {
  auto args = taken<PagedAttentionArgs>(words);
  in_op("paged_attention", [&] { attend(args); });
}

void note(const PagedAttentionArgs& args) {
  if (Notes* notes = Notes::wanted()) {
    using A = PagedAttentionArgs;
    notes->begin(play_attention);
    notes->put(args, {offsetof(A, query.data), offsetof(A, out), offsetof(A, lse),
                      offsetof(A, key_cache.data), offsetof(A, value_cache.data),
                      offsetof(A, key_scale.data), offsetof(A, value_scale.data),
                      offsetof(A, key.data), offsetof(A, value.data), offsetof(A, slot_mapping),
                      offsetof(A, block_table), offsetof(A, seq_lens),
                      offsetof(A, query_start_loc), offsetof(A, alibi_slopes),
                      offsetof(A, sinks)});
  }
}

Result run(PagedAttentionArgs& args, const Tensor& query) {
  std::vector<int64_t> out_shape{args.tokens, args.heads, args.value_dim};
  std::vector<int64_t> lse_shape{args.tokens, args.heads};
  Tensor out = torch::stable::new_empty(query, out_shape);
  Tensor lse = torch::stable::new_empty(query, lse_shape, ScalarType::Float);
  args.out = out.mutable_data_ptr();
  args.lse = static_cast<float*>(lse.mutable_data_ptr());
  attend(args);
  note(args);
  return {out, lse};
}

Result paged_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table,
                       Tensor seq_lens, Tensor query_start_loc, double scale, bool causal,
                       std::optional<int64_t> window, std::optional<double> softcap,
                       Maybe alibi_slopes, Maybe sinks, Maybe key_scale, Maybe value_scale) {
  return in_op("paged_attention", [&] {
    Options options{causal, window, softcap, alibi_slopes, sinks, key_scale, value_scale};
    auto args = arguments_of(query, key_cache, value_cache, block_table, seq_lens,
                             query_start_loc, scale, options);
    return run(args, query);
  });
}

Result paged_attention_(Tensor query, Tensor key, Tensor value, Tensor key_cache,
                        Tensor value_cache, Tensor slot_mapping, Tensor block_table,
                        Tensor seq_lens, Tensor query_start_loc, double scale, bool causal,
                        std::optional<int64_t> window, std::optional<double> softcap,
                        Maybe alibi_slopes, Maybe sinks, Maybe key_scale, Maybe value_scale) {
  return in_op("paged_attention", [&] {
    Options options{causal, window, softcap, alibi_slopes, sinks, key_scale, value_scale};
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

// A layer without room for its output.
PackedLinearArgs layer_of(const Tensor& input, const Tensor& weight, const Tensor* bias,
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
              scale ? ScalarType::Char : is_halves ? kept : dtype);
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

Tensor room_for(const Tensor& input, PackedLinearArgs& layer) {
  Tensor out = torch::stable::new_empty(input, std::vector<int64_t>{layer.rows, layer.size_out});
  layer.out = out.mutable_data_ptr();
  return out;
}

// As is measured to be fastest, on the threads of this moment.
void multiply(std::vector<PackedLinearArgs>& layers, bool is_gated) {
  for (auto& layer : layers) {
    layer.threads = int32_t(torch::stable::get_num_threads());
    layer.products = layer.is_halves ? forms.linear_halves : forms.linear;
    layer.asks_near = forms.linear_near, layer.asks_near_once = forms.linear_near_once;
  }
  if (compiled_attn_packed_linear(layers.data(), int64_t(layers.size()), is_gated) != kOk) {
    fail("scratch memory", "none", "free memory");
  }
}

void play_linear(const int64_t* words) {
  const int64_t count = words[0], is_gated = words[1];
  words += 2;
  std::vector<PackedLinearArgs> layers;
  for (int64_t i = 0; i < count; ++i) layers.push_back(taken<PackedLinearArgs>(words));
  in_op(is_gated ? "packed_gated" : count > 1 ? "packed_linears" : "packed_linear",
        [&] { multiply(layers, is_gated); });
}

void multiply_and_note(std::vector<PackedLinearArgs>& layers, bool is_gated = false) {
  multiply(layers, is_gated);
  if (Notes* notes = Notes::wanted()) {
    using A = PackedLinearArgs;
    notes->begin(play_linear), notes->put(int64_t(layers.size())), notes->put(is_gated);
    for (const auto& layer : layers)
      notes->put(layer, {offsetof(A, input), offsetof(A, weight), offsetof(A, scale),
                         offsetof(A, bias), offsetof(A, out)});
  }
}

Tensor packed_linear(Tensor input, Tensor weight, Maybe bias, Maybe scale) {
  return in_op("packed_linear", [&] {
    std::vector layers{layer_of(input, weight, bias ? &*bias : nullptr, scale ? &*scale : nullptr)};
    Tensor out = room_for(input, layers[0]);
    multiply_and_note(layers);
    return out;
  });
}

void check_one_each(const char* name, const std::vector<Tensor>& of,
                    const std::vector<Tensor>& weights) {
  if (of.empty() || of.size() == weights.size()) return;
  fail(text(name, " of all weights or of none"), text(of.size(), " for ", weights.size()),
       "call the op for the others apart");
}

std::vector<PackedLinearArgs> layers_of(const Tensor& input, const std::vector<Tensor>& weights,
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

std::vector<Tensor> packed_linears(Tensor input, std::vector<Tensor> weights,
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

Tensor packed_gated(Tensor input, std::vector<Tensor> weights, std::vector<Tensor> biases,
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

void look_up(const PackedRowsArgs& args) {
  int64_t bad = 0;
  if (take_packed_rows(args, bad)) return;
  fail(text("ids in 0..", args.panels * kRowsOfPanel - 1), std::to_string(bad),
       "look up rows of the weight");
}

void play_rows(const int64_t* words) {
  const auto args = taken<PackedRowsArgs>(words);
  in_op("packed_rows", [&] { look_up(args); });
}

Tensor packed_rows(Tensor weight, Tensor ids) {
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

Tensor drawn_tokens(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p,
                    Tensor uniform) {
  return in_op("drawn_tokens", [&] {
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
    DrawnTokensArgs args{};
    args.logits = logits.const_data_ptr(), args.logits_row = logits.stride(0);
    args.temperature = data_of<double>(temperature), args.top_k = data_of<int64_t>(top_k);
    args.top_p = data_of<double>(top_p), args.min_p = data_of<double>(min_p);
    args.uniform = data_of<double>(uniform);
    args.tokens = static_cast<int64_t*>(tokens.mutable_data_ptr());
    args.rows = rows, args.vocab = vocab, args.dtype = *dtype;
    args.threads = int32_t(torch::stable::get_num_threads());
    if (compiled_attn_drawn_tokens(&args) != kOk) fail("scratch memory", "none", "free memory");
    return tokens;
  });
}

}  // namespace
}  // namespace compiled_attn

extern "C" __attribute__((visibility("default"))) void compiled_attn_set_forms(
    const compiled_attn::Forms* forms) {
  compiled_attn::forms = *forms;
}

STABLE_TORCH_LIBRARY_FRAGMENT(COMPILED_ATTN_NAMESPACE, m) {
  m.def(compiled_attn::kPagedAttentionSchema);
  m.def(compiled_attn::kPagedAttentionWriteSchema);
  m.def(compiled_attn::kPackedLinearSchema);
  m.def(compiled_attn::kPackedLinearsSchema);
  m.def(compiled_attn::kPackedGatedSchema);
  m.def(compiled_attn::kPackedRowsSchema);
  m.def(compiled_attn::kDrawnTokensSchema);
}

STABLE_TORCH_LIBRARY_IMPL(COMPILED_ATTN_NAMESPACE, CPU, m) {
  m.impl("paged_attention", TORCH_BOX(&compiled_attn::paged_attention));
  m.impl("paged_attention_", TORCH_BOX(&compiled_attn::paged_attention_));
  m.impl("packed_linear", TORCH_BOX(&compiled_attn::packed_linear));
  m.impl("packed_linears", TORCH_BOX(&compiled_attn::packed_linears));
  m.impl("packed_gated", TORCH_BOX(&compiled_attn::packed_gated));
  m.impl("packed_rows", TORCH_BOX(&compiled_attn::packed_rows));
  m.impl("drawn_tokens", TORCH_BOX(&compiled_attn::drawn_tokens));
}
