// LoRA adapters on the CPU: each row adds the change of its own adapter.
#include <omp.h>

#include <algorithm>
#include <type_traits>

#include "vector/elements.h"
#include "vector/float_mode.h"

namespace compiled_attn {
namespace {

constexpr int kRanks = 4;                           // computed together
constexpr int kMaxRows = kRegisters >= 32 ? 4 : 2;  // of one adapter, computed together
constexpr int64_t kMaxRank = 1024;  // as in lora_op.h

// The next kLanes elements, or the last n and zeros.
template <class Element>
CA_INLINE Floats load_some(const Element* at, int64_t n) {
  if (n >= kLanes) return load(at);
  Element padded[kLanes] = {};
  std::memcpy(padded, at, n * sizeof(Element));
  return load(padded);
}

template <class Element>
CA_INLINE void store_some(Element* at, Floats v, int64_t n) {
  float values[kLanes];
  store(values, v);
  for (int64_t i = 0; i < std::min<int64_t>(n, kLanes); ++i) from_float(values[i], at + i);
}

// Lanes are added in a fixed order, so that a row has the same bits beside any others.
inline float sum_of(Floats v) {
  float values[kLanes], sum = 0;
  store(values, v);
  for (const float each : values) sum += each;
  return sum;
}

// Calls `step` with a width for each kLanes of n elements, and for the rest of them.
template <class Step>
CA_INLINE void each_lanes(int64_t n, const Step& step) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) step(i, std::integral_constant<int64_t, kLanes>());
  if (i < n) step(i, n - i);
}

// Computes rows that share a slot, one after the other in memory.
template <class Element, int rows>
void add(const AddLoraArgs& args, int64_t row, int64_t slot, float* hidden) {
  const int64_t rank = args.ranks[slot], size_in = args.size_in, size_out = args.size_out;
  const auto* input = static_cast<const Element*>(args.input) + row * args.input_row;
  const auto* a = static_cast<const Element*>(args.a) + slot * args.max_rank * size_in;
  const auto* b = static_cast<const Element*>(args.b) + slot * args.max_rank * size_out;
  for (int64_t r = 0; r < rank; r += kRanks) {
    const int together = int(std::min<int64_t>(kRanks, rank - r));
    const Element* from[kRanks];
    for (int j = 0; j < kRanks; ++j)  // surplus ranks repeat the last one
      from[j] = a + (r + std::min(j, together - 1)) * size_in;
    Floats sums[rows][kRanks] = {};
    each_lanes(size_in, [&](int64_t k, auto width) {
      Floats inputs[rows];
      for (int i = 0; i < rows; ++i) inputs[i] = load_some(input + i * args.input_row + k, width);
      for (int j = 0; j < kRanks; ++j) {
        const Floats weight = load_some(from[j] + k, width);
        for (int i = 0; i < rows; ++i) sums[i][j] = fused(weight, inputs[i], sums[i][j]);
      }
    });
    for (int i = 0; i < rows; ++i)
      for (int j = 0; j < together; ++j) hidden[i * kMaxRank + r + j] = sum_of(sums[i][j]);
  }
  const Floats scale = splat(args.scale[slot]);
  const auto* out = static_cast<const Element*>(args.out) + row * size_out;
  auto* result = static_cast<Element*>(args.result) + row * size_out;
  each_lanes(size_out, [&](int64_t n, auto width) {
    Floats sums[rows] = {};
    for (int64_t r = 0; r < rank; ++r) {
      const Floats weight = load_some(b + r * size_out + n, width);
      for (int i = 0; i < rows; ++i)
        sums[i] = fused(splat(hidden[i * kMaxRank + r]), weight, sums[i]);
    }
    for (int i = 0; i < rows; ++i) {
      const Floats before = load_some(out + i * size_out + n, width);
      store_some(result + i * size_out + n, fused(scale, sums[i], before), width);
    }
  });
}

template <class Element>
void add_rows(const AddLoraArgs& args, int64_t begin, int64_t end) {
  const int64_t bytes = args.size_out * sizeof(Element);
  float hidden[kMaxRows * kMaxRank];
  for (int64_t row = begin; row < end;) {
    const int32_t slot = args.slot_of[row];
    int64_t last = row + 1;
    while (last < end && args.slot_of[last] == slot) ++last;
    if (slot == 0 || args.ranks[slot] == 0) {
      std::memcpy(static_cast<char*>(args.result) + row * bytes,
                  static_cast<const char*>(args.out) + row * bytes, (last - row) * bytes);
      row = last;
      continue;
    }
    for (; row + kMaxRows <= last; row += kMaxRows) add<Element, kMaxRows>(args, row, slot, hidden);
    for (; row < last; ++row) add<Element, 1>(args, row, slot, hidden);
  }
}

}  // namespace
}  // namespace compiled_attn

extern "C" void compiled_attn_add_lora(const compiled_attn::AddLoraArgs* args) {
  using namespace compiled_attn;
  const int64_t rows = args->rows;
  const int threads = int(std::clamp<int64_t>(rows, 1, args->threads));
#pragma omp parallel num_threads(threads)
  {
    const FloatMode mode;
    const int64_t share = (rows + threads - 1) / threads, begin = share * omp_get_thread_num();
    const int64_t end = std::min(rows, begin + share);
    if (args->dtype == kFloat32) {
      add_rows<float>(*args, begin, end);
    } else {
      add_rows<BFloat16>(*args, begin, end);
    }
  }
}
