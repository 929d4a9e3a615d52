// Paged attention on the CPU: checks arguments, plans, runs threads, merges.
#include <omp.h>

#include <atomic>
#include <memory>

#include "attention/plan.h"
#include "attention/prefill_amx.h"
#include "attention/rows.h"
#include "vector/float_mode.h"

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

// Runs body on each thread; returns false if one ran out of memory.
template <class Body>
bool on_threads(int threads, const Body& body) {
  std::atomic<bool> is_out_of_memory{false};
#pragma omp parallel num_threads(threads)
  {
    const FloatMode mode;
    try {
      body();
    } catch (...) {  // only std::bad_alloc is thrown
      is_out_of_memory = true;
    }
  }
  return !is_out_of_memory;
}

int at_most(int64_t n, int threads) { return int(std::clamp<int64_t>(n, 1, threads)); }

// Parallel loop; `make` makes each thread's worker.
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

// Runs a thread's parts; makes the prefill kernel, which needs much memory, on first use.
template <class Decode, class Prefill>
class Worker {
 public:
  Worker(const Args& args, PartQueue parts) : args_(args), parts_(parts) {}

  void run(const Results& results) {
    while (const Part* part = parts_.pop()) run(*part, results);
  }

 private:
  void run(const Part& part, const Results& results) {
    if (is_decode(part)) {
      if (!decode_) decode_ = std::make_unique<Decode>(args_, [this] { return peek_decode(); });
      decode_->run(part, results);
    } else {
      if (!prefill_) prefill_ = std::make_unique<Prefill>(args_);
      prefill_->run(part, results);
    }
  }

  bool is_decode(const Part& part) const {
    return Plan::is_decode(args_, part.request, Prefill::kMinRows);
  }

  const Part* peek_decode() {
    const Part* part = parts_.peek();
    return part && is_decode(*part) ? part : nullptr;
  }

  const Args& args_;
  PartQueue parts_;
  std::unique_ptr<Decode> decode_;
  std::unique_ptr<Prefill> prefill_;
};

// Merges the rows of a group into those of its first state.
void merge(const Args& args, const Plan& plan, const Group& group, const Results& results) {
  const Part& first = plan.parts[group.first];
  const auto sums = [&](int64_t row) { return results.sums + row * args.value_dim; };
  for (int64_t row = 0; row < first.rows(); ++row) {
    const int64_t all = first.results + row;
    for (int64_t i = 1; i < group.states; ++i) {
      const int64_t more = all + i * first.rows();
      merge_softmax(results.states[more], sums(more), args.value_dim, results.states[all],
                    sums(all));
    }
    write_output(args, results.row_of_output(first, row), sums(all), results.states[all]);
  }
}

template <class Decode, class Prefill>
bool attend(const Args& args, int threads) {
  const Plan plan(args, Prefill::kMinRows, Prefill::target_bands(args, threads), threads);
  Scratch scratch;
  Results results{args, nullptr, nullptr};
  scratch.take(results.sums, plan.rows * args.value_dim);
  scratch.take(results.states, plan.rows);
  if (args.slot_mapping && !write_tokens(args, threads)) return false;
  std::atomic<size_t> next{0};
  const int used = at_most(plan.parts.size(), threads);
  if (!on_threads(used, [&] {
        Worker<Decode, Prefill>(args, PartQueue(plan.parts, next, used)).run(results);
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

template <class Decode>
bool attend_bfloat16(const Args& args, int threads) {
#if CA_HAS_TILES
  if (args.tuning.prefill == kAmxTiles) return attend<Decode, PrefillKernelAmx>(args, threads);
#endif
#if CA_HAS_BF16_DOT
  if (args.tuning.prefill <= kBf16Dot)
    return attend<Decode, PrefillKernel<Bf16Units>>(args, threads);
#endif
  return attend<Decode, PrefillKernel<Float32Units<BFloat16>>>(args, threads);
}

bool attend_bfloat16(const Args& args, int threads) {
#if CA_HAS_BF16_DOT
  if (args.tuning.decode <= kBf16Dot) return attend_bfloat16<DecodeKernel<Bf16Dot>>(args, threads);
#endif
  return attend_bfloat16<DecodeKernel<Bf16Widen>>(args, threads);
}

bool attend(const Args& args, int threads) {
#if CA_HAS_INT8_VNNI
  if (args.query_dtype == kBFloat16 && args.cache_dtype == kInt8)
    return attend<DecodeKernel<Int8Vnni>, PrefillKernel<Float32Units<int8_t>>>(args, threads);
#elif CA_HAS_INT8_MADD
  if (args.query_dtype == kBFloat16 && args.cache_dtype == kInt8)
    return attend<DecodeKernel<Int8Madd>, PrefillKernel<Float32Units<int8_t>>>(args, threads);
#endif
  return by_dtype(args.cache_dtype, [&](auto* type) {
    using Element = std::remove_pointer_t<decltype(type)>;
    if constexpr (std::is_same_v<Element, BFloat16>) {
      return attend_bfloat16(args, threads);
    } else {
      using Prefill = PrefillKernel<Float32Units<Element>>;
#if CA_HAS_FP8_TABLES
      if constexpr (is_quantised<Element> && !std::is_same_v<Element, int8_t>)
        if (args.query_dtype == kBFloat16)
          return attend<DecodeKernel<Fp8Table<Element>>, Prefill>(args, threads);
#endif
      return attend<DecodeKernel<Float32Fma<Element>>, Prefill>(args, threads);
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
