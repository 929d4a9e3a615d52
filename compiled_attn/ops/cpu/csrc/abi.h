// The plain C interface of the kernels: pointers, strides in elements, sizes.
//
// Their translation units are compiled for each instruction set; all export the same symbols.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <type_traits>

namespace compiled_attn {

enum Dtype : int32_t { kFloat32, kBFloat16, kFloat16, kInt8, kFloat8E4M3, kFloat8E5M2 };

// What is wrong with the arguments; `error` of the call then says where.
enum Status : int32_t {
  kOk,
  kBadOffsets,   // query_start_loc falls, or ends outside the tokens: {request, begin, end}
  kBadLength,    // a length is negative or longer than its block table: {request, length}
  kBadBlock,     // a block is not in the cache: {request, column, block}
  kBadSlot,      // a slot is not in the cache: {token, slot}
  kOutOfMemory,  // no scratch memory: {}
};

// How bfloat16, or float32 with halves, is multiplied: in tile registers, by dot products of pairs, or as float32. Of those
// that an instruction set lacks, the next serves.
enum Products : int32_t { kTiles, kPairs, kFloats };

// What processors of the same instructions do at different speeds. The defaults are the best guess.
struct Forms {
  int32_t few_rows = kPairs, many_rows = kTiles;  // products of attention
  int32_t linear = kTiles;                        // products of linear layers
  int32_t asks_near = 0;  // keys and values come to the first level cache, else the second
  int64_t ahead_bytes = 32768;  // between what is read and what is asked for
  int32_t linear_near = 1, linear_near_once = 1;  // the same of weights: read again or once
  int32_t linear_halves = kFloats;  // products of linear layers of halves: tiles or as float32
};

// Elements of a cache at [block, slot, head, 0]; the innermost stride is 1.
struct Pages {
  void* data;
  int64_t block, slot, head;
};

// Rows of [token, head, 0]; the innermost stride is 1.
struct Rows {
  const void* data;
  int64_t token, head;
};

struct PagedAttentionArgs {
  // Query [tokens, heads, head_dim]; out [tokens, heads, value_dim] and lse [tokens, heads] are
  // contiguous, out in the query's dtype.
  Rows query;
  void* out;
  float* lse;

  // Caches [num_blocks, block_size, kv_heads, head_dim or value_dim]; scales are float32 without
  // the last axis; both or neither are null.
  Pages key_cache, value_cache, key_scale, value_scale;

  // This step's keys and values [tokens, kv_heads, ...] in the query's dtype, written to the caches
  // at slot_mapping [tokens] before anything is read; null: nothing is written.
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
  double scale;
  double softcap;  // 0: none

  int32_t query_dtype, cache_dtype;
  int32_t causal;
  int32_t threads;  // 0: as many as OpenMP would take
  Forms forms;
};

// Offsets of all its addresses, in bytes: a call that is played again may have them elsewhere.
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

template <class Field>
constexpr bool kHasAddress =
    std::is_pointer_v<Field> || std::is_same_v<Field, Rows> || std::is_same_v<Field, Pages>;

template <class... Fields>
constexpr std::size_t count_addresses(const Fields&...) {
  return (std::size_t(kHasAddress<Fields>) + ...);
}

// A new field does not compile until it is named here, nor a new address that the list lacks.
constexpr std::size_t count_addresses_of(const PagedAttentionArgs& args) {
  const auto& [query, out, lse, key_cache, value_cache, key_scale, value_scale, key, value,
               slot_mapping, block_table, table_stride, seq_lens, query_start_loc, alibi_slopes,
               sinks, tokens, requests, table_width, num_blocks, block_size, heads, kv_heads,
               head_dim, value_dim, window, scale, softcap, query_dtype, cache_dtype, causal,
               threads, forms] = args;
  return count_addresses(query, out, lse, key_cache, value_cache, key_scale, value_scale, key,
                         value, slot_mapping, block_table, table_stride, seq_lens, query_start_loc,
                         alibi_slopes, sinks, tokens, requests, table_width, num_blocks, block_size,
                         heads, kv_heads, head_dim, value_dim, window, scale, softcap, query_dtype,
                         cache_dtype, causal, threads, forms);
}
static_assert(count_addresses_of(PagedAttentionArgs{}) == std::size(kPagedAttentionAddresses),
              "an address of PagedAttentionArgs is not in kPagedAttentionAddresses");

// out = input x weight^T x scale + bias, all of bfloat16 or of float32, sums of float32.
struct PackedLinearArgs {
  const void* input;  // [rows, size_in], rows `input_row` elements apart
  int64_t input_row, out_row;
  // Pairs of inputs of 16 outputs, [size_out / 16, size_in / 2, 16, 2]; in float32 single ones,
  // [size_out / 16, size_in, 16, 1], or pairs of the upper halves of what has zeros in the lower.
  const void* weight;
  const float* scale;  // [size_out], the weight is int8 and the input bfloat16 then; or null
  const void* bias;    // [size_out] or null
  void* out;           // [rows, size_out], rows `out_row` elements apart
  int64_t rows, size_in, size_out;
  int32_t dtype, threads;
  int32_t is_halves;  // the weight
  int32_t products;   // of bfloat16 or of halves, see Forms
  int32_t asks_near, asks_near_once;  // Forms::linear_near, Forms::linear_near_once
};

// Words that `compiled_attn_call` passes: as many stand behind the function, whatever it takes.
constexpr int kMostWords = 64;

// What stands for a token that there is not.
constexpr int64_t kNoToken = -1;    // the row's largest logit is NaN or infinite
constexpr int64_t kUndecided = -2;  // bounds of the sums don't tell which it is

// The token of each row of logits; its settings are [rows] each.
struct DrawnTokensArgs {
  const void* logits;  // [rows, vocab], rows `logits_row` elements apart
  int64_t logits_row;
  const double* temperature;  // 0: the most likely token, of equal ones the lowest
  const int64_t* top_k;       // 1 or more
  const double *top_p, *min_p;
  const double* uniform;  // place in the running sum, in [0, 1)
  int64_t* tokens;        // [rows]
  int64_t rows, vocab;
  int32_t dtype, threads;
};

}  // namespace compiled_attn

// Whether the ops of this thread are to note each call; see tape.h.
extern "C" void compiled_attn_note_calls(int32_t are_wanted);

// The call that this thread noted last, which is forgotten: its words, the address of its entry
// first, and which of them are addresses. The number of words, 0 if none was noted; they hold until
// the next call.
extern "C" int64_t compiled_attn_noted(const int64_t** words, const int64_t** pointers,
                                       int64_t* pointer_count);

// Makes calls, each {words in all, entry, words...}: null, or why one failed, behind which none was
// made. The text holds until the thread's next play.
extern "C" const char* compiled_attn_play(const int64_t* tape, int64_t words);

// The entry of any function that takes words alone, at most kMostWords: {function, words...}.
extern "C" void compiled_attn_call(const int64_t* words);

// What was measured to be fastest, for all calls to come.
extern "C" void compiled_attn_set_forms(const compiled_attn::Forms* forms);

extern "C" int32_t compiled_attn_paged_attention(const compiled_attn::PagedAttentionArgs* args,
                                                 int64_t error[4]);

// is_gated: of two layers, silu of the first times the second comes to where the first one's output
// would; the second one's is null. kOk or kOutOfMemory.
extern "C" int32_t compiled_attn_packed_linear(const compiled_attn::PackedLinearArgs* layers,
                                               int64_t count, int32_t is_gated);

// kOk or kOutOfMemory.
extern "C" int32_t compiled_attn_drawn_tokens(const compiled_attn::DrawnTokensArgs* args);
