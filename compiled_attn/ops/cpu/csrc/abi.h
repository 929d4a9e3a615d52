// The plain C interface of the kernels: pointers, strides in elements, sizes.
//
// All instruction sets export the same symbols.
#pragma once

#include <cstddef>
#include <cstdint>

namespace compiled_attn {

enum Dtype : int32_t { kFloat32, kBFloat16, kFloat16, kInt8, kFloat8E4M3, kFloat8E5M2 };

// Errors found in the arguments; `error` of the call has the numbers in braces.
enum Status : int32_t {
  kOk,
  kBadOffsets,  // query_start_loc decreases or exceeds the tokens: {request, begin, end}
  kBadLength,  // a length is negative or exceeds its block table: {request, length}
  kBadBlock,  // a block is outside the cache: {request, column, block}
  kBadSlot,  // a slot is outside the cache: {token, slot}
  kOutOfMemory,  // cannot allocate scratch memory: {}
  kNoKernel,  // the part of the library for caches of so many bits cannot be loaded: {bits}
};

// How dot products of bfloat16 (or of float32 with bfloat16 weights) are computed. An instruction
// set that lacks one uses the next.
enum DotKind : int32_t { kAmxTiles, kBf16Dot, kFloat32Fma };

// Settings whose best value differs between processors with the same instructions.
struct KernelTuning {
  int32_t decode = kBf16Dot, prefill = kAmxTiles;  // dot products of attention
  int32_t linear = kAmxTiles;  // dot products of linear layers
  int32_t prefetch_l1 = 0;  // prefetch keys and values to L1, else to L2
  int64_t prefetch_bytes = 32768;  // prefetch distance
  // the same for weights read once per block of rows, or once only
  int32_t linear_prefetch_l1 = 1, linear_prefetch_l1_once = 1;
  int32_t linear_bf16_weights = kFloat32Fma;  // of float32 inputs with bfloat16 weights
};

// A cache, element [block, slot, head, 0]; the innermost stride is 1.
struct Pages {
  void* data;
  int64_t block, slot, head;
};

// Rows [token, head, 0]; the innermost stride is 1.
struct Rows {
  const void* data;
  int64_t token, head;
};

constexpr int64_t kSegmentUnit = 64;

struct PagedAttentionArgs {
  // Query [tokens, heads, head_dim]; out [tokens, heads, value_dim] in the query's dtype and lse
  // [tokens, heads], both contiguous.
  Rows query;
  void* out;
  float* lse;

  // Caches [num_blocks, block_size, kv_heads, head_dim or value_dim]; scales [num_blocks,
  // block_size, kv_heads] float32, both or neither null.
  Pages key_cache, value_cache, key_scale, value_scale;

  // New keys and values [tokens, kv_heads, ...] in the query's dtype, written to the caches at
  // slot_mapping [tokens] before anything is read; null: none.
  Rows key, value;
  const int64_t* slot_mapping;

  const int32_t* block_table;  // [requests, table_width]
  int64_t table_stride;
  const int32_t* seq_lens;         // [requests]
  const int32_t* query_start_loc;  // [requests + 1]
  const float* alibi_slopes;       // [heads] or null
  const float* sinks;              // [heads] or null

  int64_t tokens, requests, table_width;
  int64_t num_blocks, block_size;
  int64_t heads, kv_heads, head_dim, value_dim;
  int64_t window;  // tokens that a token sees, itself included; 0: all before it
  // Keys of a segment, a multiple of kSegmentUnit: the bits of a row then depend on what it sees
  // alone; 0: also on the number of rows of its request.
  int64_t segment;
  double scale;
  double softcap;  // 0: none

  int32_t query_dtype, cache_dtype;
  int32_t causal;
  int32_t threads;  // 0: the default of OpenMP
  KernelTuning tuning;
};

// Byte offsets of all addresses: a replayed call may have other ones.
constexpr std::size_t kPagedAttentionAddresses[] = {
    offsetof(PagedAttentionArgs, query.data),       offsetof(PagedAttentionArgs, out),
    offsetof(PagedAttentionArgs, lse),              offsetof(PagedAttentionArgs, key_cache.data),
    offsetof(PagedAttentionArgs, value_cache.data), offsetof(PagedAttentionArgs, key_scale.data),
    offsetof(PagedAttentionArgs, value_scale.data), offsetof(PagedAttentionArgs, key.data),
    offsetof(PagedAttentionArgs, value.data),       offsetof(PagedAttentionArgs, slot_mapping),
    offsetof(PagedAttentionArgs, block_table),      offsetof(PagedAttentionArgs, seq_lens),
    offsetof(PagedAttentionArgs, query_start_loc),  offsetof(PagedAttentionArgs, alibi_slopes),
    offsetof(PagedAttentionArgs, sinks),
};

// Fails when a field is added: if it is an address, add it to the list.
static_assert(sizeof(PagedAttentionArgs) == 432, "check kPagedAttentionAddresses");

// How the groups of a quantised weight give `weight = scale * code - minimum`. `scales` and `steps`
// have rows of 16 outputs; s, t: their elements. Without minimum, codes are signed: half of their
// range is zero.
enum GroupKind : int32_t {
  kScale,         // scale s
  kScaleMinimum,  // two rows of s: scale, minimum
  kScaleZero,     // scale s, zero point t (uint8): minimum s * t
  kSuperScale,    // scale s * t (int8)
  kSuperBoth,     // two rows of both (uint8): scale and minimum, each s * t
};

// A quantised weight: codes of `bits` bits for blocks of 32 inputs of 16 outputs,
// [size_out / 16, size_in / 32, 64 * bits] bytes, see linear/quantised_codes.h.
struct QuantisedWeight {
  const uint8_t* codes;
  const void* scales;  // [size_out / 16, scale_groups, 1 or 2, 16] float16 or float32
  const uint8_t* steps;  // [size_out / 16, step_groups, 1 or 2, 16] or null
  int64_t scale_groups, step_groups;  // of equal size along the inputs
  int32_t bits, kind;  // kind: a GroupKind
  int32_t scales_are_float32;
  int32_t int8_inputs;  // quantise inputs to int8, by row and 32 of them
};

// out = input x weight^T + bias in bfloat16 or float32, accumulated in float32.
struct PackedLinearArgs {
  const void* input;  // [rows, size_in], rows `input_row` elements apart
  int64_t input_row, out_row;
  // bfloat16: pairs of inputs of 16 outputs, [size_out / 16, size_in / 2, 16, 2]. float32:
  // [size_out / 16, size_in, 16, 1]; bf16-widen: weights exact in bfloat16, in its layout.
  const void* weight;
  const void* bias;  // [size_out] or null
  void* out;         // [rows, size_out], rows `out_row` elements apart
  int64_t rows, size_in, size_out;
  int32_t dtype, threads;
  int32_t weight_is_bf16;  // under float32 inputs
  int32_t products;  // a DotKind
  int32_t prefetch_l1, prefetch_l1_once;  // see KernelTuning::linear_prefetch_l1
  QuantisedWeight quantised;  // in place of the weight; codes null: not quantised
};

// Rows `ids` of a quantised weight, which must be in range.
struct QuantisedRowsArgs {
  QuantisedWeight weight;
  const int64_t* ids;  // [count]
  void* out;           // [count, size_in] float32 or bfloat16
  int64_t count, size_in, size_out;
  int64_t as_bfloat16;
};

// result = out + scale * b x (a x input), by row: each has the matrices of its slot, none in slot 0.
struct AddLoraArgs {
  const void* out;    // [rows, size_out]
  const void* input;  // [rows, size_in], rows `input_row` elements apart
  const void* a;      // [slots, max_rank, size_in]
  const void* b;      // [slots, max_rank, size_out]
  const float* scale;     // [slots]
  const int32_t* ranks;   // [slots], 0: this layer is as it is
  const int32_t* slot_of;  // [rows]
  void* result;           // [rows, size_out]
  int64_t rows, input_row, size_in, size_out, max_rank;
  int32_t dtype, threads;
};

// Words passed by `compiled_attn_call`, whatever the function takes: the buffer must be that long.
constexpr int kMaxWords = 64;

// Results without a token.
constexpr int64_t kNoToken = -1;  // the largest logit is NaN or infinite
constexpr int64_t kUndecided = -2;  // rounding could change the token

// Samples one token per row of logits; settings are [rows].
struct SampleTokensArgs {
  const void* logits;  // [rows, vocab], rows `logits_row` elements apart
  int64_t logits_row;
  const double* temperature;  // 0: greedy, ties to the lowest id
  const int64_t* top_k;       // 1 or more
  const double *top_p, *min_p;
  const double* uniform;  // position in the cumulative weights, in [0, 1)
  int64_t* tokens;        // [rows]
  int64_t rows, vocab;
  int32_t dtype, threads;
};

}  // namespace compiled_attn

// Turns recording of the ops' calls by this thread on or off; see replay.h.
extern "C" void compiled_attn_record_calls(int32_t enabled);

// Takes the last call recorded by this thread: its words, beginning with the entry point, and the
// positions of addresses among them. Returns the number of words, 0 if none. They are valid until
// the next call.
extern "C" int64_t compiled_attn_recorded_call(const int64_t** words, const int64_t** pointers,
                                               int64_t* pointer_count);

// Makes calls, each {number of words, entry, words...}. Returns null, or the error that stopped it,
// valid until the thread's next replay.
extern "C" const char* compiled_attn_replay(const int64_t* calls, int64_t words);

// Entry point for any function that takes at most kMaxWords words: {function, words...}.
extern "C" void compiled_attn_call(const int64_t* words);

// Sets the tuning for all later calls.
extern "C" void compiled_attn_set_tuning(const compiled_attn::KernelTuning* tuning);

// Of a library without kernels for 8-bit and 16-bit caches: sets what builds them when a call needs
// them first, and returns 0 if it cannot.
extern "C" void compiled_attn_build_parts_by(int32_t (*build)(int32_t bits));

extern "C" int32_t compiled_attn_paged_attention(const compiled_attn::PagedAttentionArgs* args,
                                                 int64_t error[4]);

// is_swiglu: writes silu(first layer) * second layer to the output of the first; the second's is
// null. Returns kOk or kOutOfMemory.
extern "C" int32_t compiled_attn_packed_linear(const compiled_attn::PackedLinearArgs* layers,
                                               int64_t count, int32_t is_swiglu);

// The same for layers of quantised weights, which share `int8_inputs`.
extern "C" int32_t compiled_attn_quantised_linear(const compiled_attn::PackedLinearArgs* layers,
                                                  int64_t count, int32_t is_swiglu);

extern "C" void compiled_attn_quantised_rows(const compiled_attn::QuantisedRowsArgs* args);

extern "C" void compiled_attn_add_lora(const compiled_attn::AddLoraArgs* args);

// Returns kOk or kOutOfMemory.
extern "C" int32_t compiled_attn_sample_tokens(const compiled_attn::SampleTokensArgs* args);
