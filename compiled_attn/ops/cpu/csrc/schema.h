// Schemas of the ops; compiled_attn/ops/schema.py reads them from here.
#pragma once

namespace compiled_attn {

constexpr const char* kPagedAttentionSchema =
    R"schema(paged_attention(
    Tensor query, Tensor key_cache, Tensor value_cache,
    Tensor block_table, Tensor seq_lens, Tensor query_start_loc, float scale, *,
    bool causal=True, int? window=None, float? softcap=None,
    Tensor? alibi_slopes=None, Tensor? sinks=None,
    Tensor? key_scale=None, Tensor? value_scale=None, int? segment=None
  ) -> (Tensor out, Tensor lse))schema";

constexpr const char* kPagedAttentionWriteSchema =
    R"schema(paged_attention_(
    Tensor query, Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache,
    Tensor slot_mapping,
    Tensor block_table, Tensor seq_lens, Tensor query_start_loc, float scale, *,
    bool causal=True, int? window=None, float? softcap=None,
    Tensor? alibi_slopes=None, Tensor? sinks=None,
    Tensor(c!)? key_scale=None, Tensor(d!)? value_scale=None, int? segment=None
  ) -> (Tensor out, Tensor lse))schema";

constexpr const char* kPackedLinearSchema =
    R"schema(packed_linear(
    Tensor input, Tensor weight, Tensor? bias=None
  ) -> Tensor)schema";

constexpr const char* kPackedLinearsSchema =
    R"schema(packed_linears(
    Tensor input, Tensor[] weights, Tensor[] biases
  ) -> Tensor[])schema";

constexpr const char* kPackedSwigluSchema =
    R"schema(packed_swiglu(
    Tensor input, Tensor[] weights, Tensor[] biases
  ) -> Tensor)schema";

constexpr const char* kPackedRowsSchema =
    R"schema(packed_rows(Tensor weight, Tensor ids) -> Tensor)schema";

constexpr const char* kQuantisedLinearSchema =
    R"schema(quantised_linear(
    Tensor input, Tensor codes, Tensor scales, Tensor steps, Tensor? bias=None,
    bool int8_inputs=False
  ) -> Tensor)schema";

constexpr const char* kQuantisedLinearsSchema =
    R"schema(quantised_linears(
    Tensor input, Tensor[] codes, Tensor[] scales, Tensor[] steps, Tensor[] biases,
    bool int8_inputs
  ) -> Tensor[])schema";

constexpr const char* kQuantisedSwigluSchema =
    R"schema(quantised_swiglu(
    Tensor input, Tensor[] codes, Tensor[] scales, Tensor[] steps, Tensor[] biases,
    bool int8_inputs
  ) -> Tensor)schema";

constexpr const char* kQuantisedRowsSchema =
    R"schema(quantised_rows(
    Tensor codes, Tensor scales, Tensor steps, Tensor ids, bool as_bfloat16
  ) -> Tensor)schema";

constexpr const char* kAddLoraSchema =
    R"schema(add_lora(
    Tensor out, Tensor input, Tensor a, Tensor b, Tensor scale, Tensor ranks, Tensor slots
  ) -> Tensor)schema";

constexpr const char* kSampleTokensSchema =
    R"schema(sample_tokens(
    Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor uniform
  ) -> Tensor)schema";

// The state ops continue `state[slots[r]]` where a request has earlier tokens, and write it back.
constexpr const char* kStateConvSchema =
    R"schema(state_conv_(
    Tensor x, Tensor weight, Tensor? bias, Tensor(a!) state,
    Tensor slots, Tensor seq_lens, Tensor query_start_loc, bool silu
  ) -> Tensor)schema";

constexpr const char* kStateDeltaSchema =
    R"schema(state_delta_(
    Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) state,
    Tensor slots, Tensor seq_lens, Tensor query_start_loc, bool l2norm, float? scale
  ) -> Tensor)schema";

constexpr const char* kStateSsdSchema =
    R"schema(state_ssd_(
    Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor(a!) state,
    Tensor slots, Tensor seq_lens, Tensor query_start_loc
  ) -> Tensor)schema";

constexpr const char* kStateScanSchema =
    R"schema(state_scan_(
    Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor(a!) state,
    Tensor slots, Tensor seq_lens, Tensor query_start_loc
  ) -> Tensor)schema";

}  // namespace compiled_attn
