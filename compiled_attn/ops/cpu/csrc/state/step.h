// What the state ops share: requests of a step, elements as float32, work for threads.
#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <type_traits>
#include <vector>

#include "scratch.h"
#include "state/state_args.h"
#include "vector/bfloat16.h"
#include "vector/float_mode.h"
#include "vector/vmath.h"

namespace compiled_attn {

// The rows of a request with tokens.
struct StateRequest {
  int64_t begin, end;
  int64_t slot;
  bool has_past;  // whether the slot holds the state of earlier tokens; else it is not read
};

// Calls f with a null pointer to the element type.
template <class Function>
CA_INLINE void by_float(int64_t dtype, const Function& f) {
  if (dtype == kBFloat16) return f(static_cast<BFloat16*>(nullptr));
  if (dtype == kFloat16) return f(static_cast<Float16*>(nullptr));
  f(static_cast<float*>(nullptr));
}

// Reads n elements, zero-padded to a multiple of kLanes.
CA_NOINLINE inline void read(const StateInput& in, int64_t token, int64_t head, int64_t first,
                             int64_t n, float* to) {
  by_float(in.dtype, [&](auto* type) {
    using Element = std::remove_pointer_t<decltype(type)>;
    const int64_t at = token * in.token + head * in.head + first;
    to_floats(static_cast<const Element*>(in.data) + at, n, to);
  });
}

inline float read(const StateInput& in, int64_t token, int64_t head) {
  float all[kLanes];
  read(in, token, head, 0, 1, all);
  return all[0];
}

// Writes n <= kLanes elements.
CA_INLINE void write(float* to, Floats v, int64_t n) { std::memcpy(to, &v, n * sizeof *to); }
CA_INLINE void write(BFloat16* to, Floats v, int64_t n) {
  BFloat16 all[kLanes];
  store(all, v);
  std::memcpy(to, all, n * sizeof *to);
}
CA_INLINE void write(Float16* to, Floats v, int64_t n) {
  for (int64_t i = 0; i < n; ++i) from_float(v[i], to + i);
}

// Writes n elements of a row of the output.
CA_NOINLINE inline void write_out(const StateArgs& args, int64_t token, int64_t first, int64_t n,
                                  const float* from) {
  by_float(args.out_dtype, [&](auto* type) {
    auto* to = static_cast<decltype(type)>(args.out) + token * args.out_row + first;
    for (int64_t i = 0; i < n; i += kLanes)
      write(to + i, load(from + i), std::min<int64_t>(n - i, kLanes));
  });
}

// Calls a worker of each thread for every request and item, in any order.
template <class Worker>
void for_items(const StateArgs& args, const std::vector<StateRequest>& requests) {
  constexpr int64_t kWorkOfThread = 1 << 15;  // updates of elements that are worth waking a thread
  const int64_t items = Worker::items(args), count = items * int64_t(requests.size());
  int64_t tokens = 0;
  for (const StateRequest& request : requests) tokens += request.end - request.begin;
  const int64_t work = tokens * args.heads * args.rows * (args.columns + 1);
  const int64_t most = std::min({count, args.threads, 1 + work / kWorkOfThread});
  const int threads = int(std::max<int64_t>(most, 1));
  Scratch scratch;
  std::vector<Worker> workers;
  workers.reserve(threads);
  for (int i = 0; i < threads; ++i) workers.emplace_back(args, scratch);
  std::atomic<int64_t> next{0};
#pragma omp parallel num_threads(threads)
  {
    const FloatMode mode;
    Worker& worker = workers[omp_get_thread_num()];
    for (int64_t at = next++; at < count; at = next++)
      worker.run(requests[at / items], at % items);
  }
}

}  // namespace compiled_attn
