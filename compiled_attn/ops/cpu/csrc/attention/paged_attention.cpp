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
std::atomic<int32_t (*)()> build_8bit{nullptr};

// Loads attention with an 8-bit cache from NAME-8bit.so, next to this library; null if that fails.
Attend find_8bit() {
  static std::atomic<Attend> found{nullptr};
  if (found) return found;
  if (const auto build = build_8bit.load(); build && !build()) return nullptr;
  Dl_info own;
  if (!dladdr(reinterpret_cast<void*>(&find_8bit), &own)) return nullptr;
  const std::string path(own.dli_fname);
  void* part = dlopen((path.substr(0, path.rfind('.')) + "-8bit.so").c_str(), RTLD_NOW);
  if (part) found = reinterpret_cast<Attend>(dlsym(part, "compiled_attn_attend_8bit"));
  return found;
}
#else
Attend find_8bit() { return compiled_attn_attend_8bit; }
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

bool attend(const Args& args, int threads, Attend with_8bit) {
  switch (args.cache_dtype) {
    case kBFloat16:
      return attend_bfloat16(args, threads, write_tokens);
    case kFloat16:
      return attend<DecodeKernel<Float32Fma<Float16>>, PrefillKernel<Float32Units<Float16>>>(
          args, threads, write_tokens);
    case kFloat32:
      return attend<DecodeKernel<Float32Fma<float>>, PrefillKernel<Float32Units<float>>>(
          args, threads, write_tokens);
    default:
      return with_8bit(args, threads, write_tokens);
  }
}

}  // namespace
}  // namespace compiled_attn

#ifdef COMPILED_ATTN_DIVIDED
extern "C" __attribute__((visibility("default"))) void compiled_attn_build_8bit_by(
    int32_t (*build)()) {
  compiled_attn::build_8bit = build;
}
#endif

extern "C" int32_t compiled_attn_paged_attention(const compiled_attn::PagedAttentionArgs* args,
                                                 int64_t error[4]) {
  using namespace compiled_attn;
  const int threads = args->threads > 0 ? args->threads : omp_get_max_threads();
  if (const int32_t status = check(*args, error)) return status;
  try {
    const bool is_8bit = args->cache_dtype >= kInt8;
    const Attend with_8bit = is_8bit ? find_8bit() : nullptr;
    if (is_8bit && !with_8bit) return failed(error, kNoKernel);
    return attend(*args, threads, with_8bit) ? int32_t(kOk) : failed(error, kOutOfMemory);
  } catch (const std::bad_alloc&) {
    return failed(error, kOutOfMemory);
  }
}
