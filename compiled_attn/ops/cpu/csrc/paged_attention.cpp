// Paged attention on the CPU: checks, the cut into parts, threads, the merge.
#include <omp.h>

#include <atomic>
#include <memory>

#include "float_mode.h"
#include "matrix_rows.h"
#include "merge.h"
#include "plan.h"
#include "write.h"

namespace compiled_attn {
namespace {

using Args = PagedAttentionArgs;

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

// Before anything is read or written by what the numbers say.
int32_t check(const Args& args, int64_t error[4]) {
  for (int64_t r = 0; r < args.requests; ++r)
    if (const int32_t status = check_request(args, r, error)) return status;
  if (!args.slot_mapping) return kOk;
  for (int64_t t = 0; t < args.tokens; ++t)
    if (args.slot_mapping[t] < 0 || args.slot_mapping[t] >= args.num_blocks * args.block_size)
      return failed(error, kBadSlot, t, args.slot_mapping[t]);
  return kOk;
}

// Calls what each of some threads has to do; false where one ran out of memory.
template <class Body>
bool on_threads(int threads, const Body& body) {
  std::atomic<bool> is_out_of_memory{false};
#pragma omp parallel num_threads(threads)
  {
    const FloatMode mode;
    try {
      body();
    } catch (...) {  // nothing else is thrown
      is_out_of_memory = true;
    }
  }
  return !is_out_of_memory;
}

int at_most(int64_t n, int threads) { return int(std::clamp<int64_t>(n, 1, threads)); }

// A loop over threads. `make` gives each thread its worker.
template <class Make>
bool in_parallel(int64_t n, int threads, const Make& make) {
  std::atomic<int64_t> next{0};
  return on_threads(at_most(n, threads), [&] {
    auto work = make();
    for (int64_t i = next++; i < n; i = next++) work(i);
  });
}

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

// What a thread computes parts with; many rows need much memory, so made when first needed.
template <class Few, class Many>
class Worker {
 public:
  Worker(const Args& args, PartsOfThread parts) : args_(args), parts_(parts) {}

  void run(const Results& results) {
    while (const Part* part = parts_.take()) run(*part, results);
  }

 private:
  void run(const Part& part, const Results& results) {
    if (is_few(part)) {
      if (!few_) few_ = std::make_unique<Few>(args_, [this] { return few_behind(); });
      few_->run(part, results);
    } else {
      if (!many_) many_ = std::make_unique<Many>(args_);
      many_->run(part, results);
    }
  }

  bool is_few(const Part& part) const {
    return Plan::is_few(args_, part.request, Many::kLeastRows);
  }

  const Part* few_behind() {
    const Part* part = parts_.behind();
    return part && is_few(*part) ? part : nullptr;
  }

  const Args& args_;
  PartsOfThread parts_;
  std::unique_ptr<Few> few_;
  std::unique_ptr<Many> many_;
};

template <class Few, class Many>
bool attend(const Args& args, int threads) {
  const Plan plan(args, Many::kLeastRows, Many::enough_bands(args, threads), threads);
  Scratch scratch;
  Results results{args, nullptr, nullptr};
  scratch.take(results.sums, plan.rows * args.value_dim);
  scratch.take(results.running, plan.rows);
  if (args.slot_mapping && !write_tokens(args, threads)) return false;
  std::atomic<size_t> next{0};
  const int used = at_most(plan.parts.size(), threads);
  if (!on_threads(used, [&] {
        Worker<Few, Many>(args, PartsOfThread(plan.parts, next, used)).run(results);
      }))
    return false;
  const int64_t groups = plan.groups.size();
  const int64_t none_before = args.requests ? args.query_start_loc[0] : args.tokens;
  const int64_t none_after = args.requests ? args.query_start_loc[args.requests] : args.tokens;
  for (int64_t t = 0; t < none_before; ++t) write_nothing(args, t);
  for (int64_t t = none_after; t < args.tokens; ++t) write_nothing(args, t);
  return in_parallel(groups, threads, [&] {
    return [&](int64_t i) { merge(args, plan, plan.groups[i], results); };
  });
}

template <class Few>
bool attend_bfloat16(const Args& args, int threads) {
#if CA_HAS_TILES
  if (args.forms.many_rows == kTiles) return attend<Few, MatrixRows>(args, threads);
#endif
#if CA_HAS_BFLOAT16_DOT
  if (args.forms.many_rows <= kPairs) return attend<Few, Tiles<PairUnits>>(args, threads);
#endif
  return attend<Few, Tiles<FloatUnits<BFloat16>>>(args, threads);
}

bool attend_bfloat16(const Args& args, int threads) {
#if CA_HAS_BFLOAT16_DOT
  if (args.forms.few_rows <= kPairs) return attend_bfloat16<FewRows<InPairs>>(args, threads);
#endif
  return attend_bfloat16<FewRows<InHalves>>(args, threads);
}

bool attend(const Args& args, int threads) {
#if CA_HAS_INTEGER_DOT
  if (args.query_dtype == kBFloat16 && args.cache_dtype == kInt8)
    return attend<FewRows<InDigits>, Tiles<FloatUnits<int8_t>>>(args, threads);
#elif CA_HAS_WORD_PRODUCTS
  if (args.query_dtype == kBFloat16 && args.cache_dtype == kInt8)
    return attend<FewRows<InWords>, Tiles<FloatUnits<int8_t>>>(args, threads);
#endif
  return by_dtype(args.cache_dtype, [&](auto* type) {
    using Element = std::remove_pointer_t<decltype(type)>;
    if constexpr (std::is_same_v<Element, BFloat16>) {
      return attend_bfloat16(args, threads);
    } else {
#if CA_HAS_CODE_TABLES
      if constexpr (is_quantised<Element> && !std::is_same_v<Element, int8_t>)
        if (args.query_dtype == kBFloat16)
          return attend<FewRows<InCodes<Element>>, Tiles<FloatUnits<Element>>>(args, threads);
#elif CA_HAS_E4M3_AS_FLOAT16
      // Heads that are not whole vectors would be copied, which takes longer.
      if constexpr (std::is_same_v<Element, Float8E4M3>)
        if (args.head_dim % InFloat16::kWide == 0 && args.value_dim % InFloat16::kWide == 0)
          return attend<FewRows<InFloat16>, Tiles<FloatUnits<Element>>>(args, threads);
#endif
      return attend<FewRows<InFloats<Element>>, Tiles<FloatUnits<Element>>>(args, threads);
    }
  });
}

}  // namespace
}  // namespace compiled_attn

extern "C" int32_t compiled_attn_paged_attention(const compiled_attn::PagedAttentionArgs* args,
                                                 int64_t error[4]) {
  using namespace compiled_attn;
  const int threads = args->threads > 0 ? args->threads : omp_get_max_threads();
  if (const int32_t status = check(*args, error)) return status;
  try {
    return attend(*args, threads) ? int32_t(kOk) : failed(error, kOutOfMemory);
  } catch (const std::bad_alloc&) {
    return failed(error, kOutOfMemory);
  }
}
