// Runs the threads of an attention: writes new tokens, decodes and prefills, merges.
//
// Kernels are instantiated in several translation units, which compile concurrently.
#pragma once

#include <omp.h>

#include <atomic>
#include <memory>

#include "attention/plan.h"
#include "attention/prefill_amx.h"
#include "attention/rows.h"
#include "vector/float_mode.h"

namespace compiled_attn {

using Args = PagedAttentionArgs;

// Writes new keys and values to the caches; returns false if a thread ran out of memory.
using Write = bool (*)(const Args& args, int threads);

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

inline int at_most(int64_t n, int threads) { return int(std::clamp<int64_t>(n, 1, threads)); }

// Parallel loop; `make` makes each thread's worker.
template <class Make>
bool in_parallel(int64_t n, int threads, const Make& make) {
  std::atomic<int64_t> next{0};
  return on_threads(at_most(n, threads), [&] {
    auto work = make();
    for (int64_t i = next++; i < n; i = next++) work(i);
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
inline void merge(const Args& args, const Plan& plan, const Group& group, const Results& results) {
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

// Returns false if a thread ran out of memory.
template <class Decode, class Prefill>
bool attend(const Args& args, int threads, Write write) {
  const Plan plan(args, Prefill::kMinRows, Prefill::target_bands(args, threads), threads);
  Scratch scratch;
  Results results{args, nullptr, nullptr};
  scratch.take(results.sums, plan.rows * args.value_dim);
  scratch.take(results.states, plan.rows);
  if (args.slot_mapping && !write(args, threads)) return false;
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

}  // namespace compiled_attn

// Attention with a cache of 8 or 16 bits, as `attend`.
extern "C" __attribute__((visibility("default"))) bool compiled_attn_attend_8bit(
    const compiled_attn::Args& args, int threads, compiled_attn::Write write);
extern "C" __attribute__((visibility("default"))) bool compiled_attn_attend_16bit(
    const compiled_attn::Args& args, int threads, compiled_attn::Write write);
