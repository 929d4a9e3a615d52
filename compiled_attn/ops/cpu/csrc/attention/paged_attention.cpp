// Paged attention on the CPU: checks arguments, writes new tokens, selects the kernel.
#ifdef COMPILED_ATTN_DIVIDED
#include <dlfcn.h>

#include <string>
#endif

#include "attention/attend.h"

namespace compiled_attn {
namespace {

int32_t failed(int64_t error[4], Status status, int64_t a = 0, int64_t b = 0, int64_t c = 0) {
  error[0] = a, error[1] = b, error[2] = c, error[3] = 0;
  return status;
}

int32_t check_request(const Args& args, int64_t r, int64_t error[4]) {
  const int64_t begin = args.query_start_loc[r], end = args.query_start_loc[r + 1];
  if (begin < 0 || end < begin || end > args.tokens)
    return failed(error, kBadOffsets, r, begin, end);
  const int64_t length = args.seq_lens[r];
  if (length < 0 || length > args.table_width * args.block_size)
    return failed(error, kBadLength, r, length);
  const int32_t* table = args.block_table + r * args.table_stride;
  for (int64_t column = 0; column * args.block_size < length; ++column)
    if (table[column] < 0 || table[column] >= args.num_blocks)
      return failed(error, kBadBlock, r, column, table[column]);
  return kOk;
}

// Checks all indices before they are followed.
int32_t check(const Args& args, int64_t error[4]) {
  for (int64_t r = 0; r < args.requests; ++r)
    if (const int32_t status = check_request(args, r, error)) return status;
  if (!args.slot_mapping) return kOk;
  for (int64_t t = 0; t < args.tokens; ++t)
    if (args.slot_mapping[t] < 0 || args.slot_mapping[t] >= args.num_blocks * args.block_size)
      return failed(error, kBadSlot, t, args.slot_mapping[t]);
  return kOk;
}

using Attend = bool (*)(const Args& args, int threads, Write write);

#ifdef COMPILED_ATTN_DIVIDED
std::atomic<int32_t (*)(int32_t)> build_part{nullptr};

// Loads a symbol of NAME-16bit.so, next to this library; null if that fails.
Attend load_part(const std::string& bits, const char* symbol) {
  if (const auto build = build_part.load(); build && !build(std::stoi(bits))) return nullptr;
  Dl_info own;
  if (!dladdr(reinterpret_cast<void*>(&load_part), &own)) return nullptr;
  const std::string path(own.dli_fname);
  void* part = dlopen((path.substr(0, path.rfind('.')) + "-" + bits + "bit.so").c_str(), RTLD_NOW);
  return part ? reinterpret_cast<Attend>(dlsym(part, symbol)) : nullptr;
}

Attend find(bool is_8bit) {
  static std::atomic<Attend> found[2];
  std::atomic<Attend>& part = found[is_8bit];
  if (!part) {
    part = is_8bit ? load_part("8", "compiled_attn_attend_8bit")
                   : load_part("16", "compiled_attn_attend_16bit");
  }
  return part;
}
#else
Attend find(bool is_8bit) {
  return is_8bit ? compiled_attn_attend_8bit : compiled_attn_attend_16bit;
}
#endif

bool write_tokens(const Args& args, int threads) {
  constexpr int64_t kTokens = 16;  // at a time
  const int64_t dim = padded<kLanes>(std::max(args.head_dim, args.value_dim));
  return in_parallel((args.tokens + kTokens - 1) / kTokens, threads, [&] {
    return [&, row = std::vector<float>(dim)](int64_t i) mutable {
      by_dtype(args.cache_dtype, [&](auto* type) {
        using Element = std::remove_pointer_t<decltype(type)>;
        for (int64_t t = i * kTokens; t < std::min((i + 1) * kTokens, args.tokens); ++t) {
          write_token<Element>(args, t, args.key, args.head_dim, args.key_cache, args.key_scale,
                               row.data());
          if (args.value.data)
            write_token<Element>(args, t, args.value, args.value_dim, args.value_cache,
                                 args.value_scale, row.data());
        }
      });
    };
  });
}

bool attend_float32(const Args& args, int threads, Write write) {
  return attend<DecodeKernel<Float32Fma<float>>, PrefillKernel<Float32Units<float>>>(args, threads,
                                                                                     write);
}

}  // namespace
}  // namespace compiled_attn

#ifdef COMPILED_ATTN_DIVIDED
extern "C" __attribute__((visibility("default"))) void compiled_attn_build_parts_by(
    int32_t (*build)(int32_t bits)) {
  compiled_attn::build_part = build;
}
#endif

extern "C" int32_t compiled_attn_paged_attention(const compiled_attn::PagedAttentionArgs* args,
                                                 int64_t error[4]) {
  using namespace compiled_attn;
  const int threads = args->threads > 0 ? args->threads : omp_get_max_threads();
  if (const int32_t status = check(*args, error)) return status;
  try {
    const int32_t dtype = args->cache_dtype;
    const Attend attend = dtype == kFloat32 ? attend_float32 : find(dtype >= kInt8);
    if (!attend) return failed(error, kNoKernel, dtype >= kInt8 ? 8 : 16);
    return attend(*args, threads, write_tokens) ? int32_t(kOk) : failed(error, kOutOfMemory);
  } catch (const std::bad_alloc&) {
    return failed(error, kOutOfMemory);
  }
}
