// LoRA adapters on the CPU: each row adds the change of its own adapter.
#include <omp.h>

#include <algorithm>
#include <array>
#include <type_traits>
#include <utility>

#include "vector/bfloat16.h"
#include "vector/float_mode.h"

namespace compiled_attn {
namespace {

constexpr int kMaxRows = kRegisters >= 32 ? 4 : 2;  // of one adapter, computed together
constexpr int64_t kMaxRank = 1024;                  // as in lora_op.h, divisible by 8
constexpr int64_t kWindow = 64;                     // rows that are ordered by their adapters

constexpr int64_t kLine = 64;                       // bytes

// Rows of one adapter. Surplus ones repeat the last, so that all have one loop.
struct Group {
  int64_t slot, count;
  std::array<int64_t, kMaxRows> rows;
};

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
  if (n >= kLanes) return store(at, v);
  Element values[kLanes];
  store(values, v);
  std::memcpy(at, values, n * sizeof(Element));
}

// Calls `step` with a width for each kLanes of n elements, and for the rest of them.
template <class Step>
CA_INLINE void each_lanes(int64_t n, const Step& step) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) step(i, std::integral_constant<int64_t, kLanes>());
  if (i < n) step(i, n - i);
}

// Fetches a matrix of the next adapter into L2 while that of one is used; two streams at once, as
// memory serves two faster than one.
class NextMatrix {
 public:
  NextMatrix() = default;
  NextMatrix(const void* at, int64_t bytes)
      : at_(static_cast<const char*>(at)), half_(bytes / 2), left_((half_ + 63) / 64) {}

  CA_INLINE void prefetch(int lines) {
    if (left_ <= 0) return;
    for (int i = 0; i < lines; i += 2, at_ += 64) {
      __builtin_prefetch(at_, 0, 2);
      __builtin_prefetch(at_ + half_, 0, 2);
    }
    left_ -= (lines + 1) / 2;
  }
  void take_all() {
    while (left_ > 0) prefetch(2);
  }

 private:
  const char* at_ = nullptr;
  int64_t half_ = 0, left_ = 0;  // left_: lines of a half
};

struct NextAdapter {
  NextMatrix a, b;

  void take_all() { a.take_all(), b.take_all(); }
};

template <class Element>
class Adder {
 public:
  explicit Adder(const AddLoraArgs& args) : args_(args) {}

  void run(int64_t begin, int64_t end) {
    for (; begin < end; begin += kWindow) run_window(begin, std::min(begin + kWindow, end));
  }

 private:
  // Copies rows without an adapter, and computes the others, those of an adapter together.
  void run_window(int64_t begin, int64_t end) {
    std::pair<int32_t, int64_t> order[kWindow];
    int64_t count = 0;
    const int64_t bytes = args_.size_out * sizeof(Element);
    for (int64_t row = begin; row < end; ++row) {
      const int32_t slot = args_.slot_of[row];
      if (slot != 0 && args_.ranks[slot] != 0) {
        order[count++] = {slot, row};
      } else {
        std::memcpy(result(row), out(row), bytes);
      }
    }
    if (!count) return;
    std::sort(order, order + count);
    int64_t at = 0;
    const auto take = [&] {
      Group group{at < count ? order[at].first : 0, 0, {}};
      for (; at < count && order[at].first == group.slot && group.count < kMaxRows; ++at)
        group.rows[group.count++] = order[at].second;
      for (int64_t i = std::max<int64_t>(group.count, 1); i < kMaxRows; ++i)
        group.rows[i] = group.rows[i - 1];
      return group;
    };
    Group group = take();
    matrices(group.slot).take_all();
    while (group.count) {
      const Group following = take();
      NextAdapter next;
      if (following.count && following.slot != group.slot) next = matrices(following.slot);
      if (group.count == 1) {
        add<1, 8>(group, next);
      } else {
        add<kMaxRows, 4>(group, next);
      }
      next.take_all();
      group = following;
    }
  }

  // ranks: computed together, so that sums do not wait for each other
  template <int rows, int ranks>
  void add(const Group& group, NextAdapter& next) {
    const int64_t rank = args_.ranks[group.slot], size_in = args_.size_in;
    const Element *from = a(group.slot), *input[rows];
    for (int i = 0; i < rows; ++i)
      input[i] = static_cast<const Element*>(args_.input) + group.rows[i] * args_.input_row;
    for (int64_t r = 0; r < rank; r += ranks) {
      const Element* weights[ranks];
      for (int j = 0; j < ranks; ++j)  // surplus ranks repeat the last one
        weights[j] = from + std::min(r + j, rank - 1) * size_in;
      Floats sums[rows][ranks] = {};
      each_lanes(size_in, [&](int64_t k, auto width) {
        next.a.prefetch(ranks * kLanes * sizeof(Element) / kLine);
        Floats inputs[rows];
        for (int i = 0; i < rows; ++i) inputs[i] = load_some(input[i] + k, width);
        for (int j = 0; j < ranks; ++j) {
          const Floats weight = load_some(weights[j] + k, width);
          for (int i = 0; i < rows; ++i) sums[i][j] = fused(weight, inputs[i], sums[i][j]);
        }
      });
      // Lanes are added in a fixed order, so that a row has the same bits beside any others.
      for (int i = 0; i < rows; ++i)
        for (int j = 0; j < ranks; j += 4)
          store(hidden_ + i * kMaxRank + r + j,
                hsum(sums[i][j], sums[i][j + 1], sums[i][j + 2], sums[i][j + 3]));
    }
    const int64_t size = args_.size_out;
    constexpr int kWide = rows == 1 ? 4 : 2;  // vectors
    int64_t n = 0;
    for (; n + kWide * kLanes <= size; n += kWide * kLanes)
      add_columns<rows, kWide>(group, n, std::integral_constant<int64_t, kLanes>(), next);
    each_lanes(size - n, [&](int64_t k, auto width) {
      add_columns<rows, 1>(group, n + k, width, next);
    });
  }

  template <int rows, int vectors, class Width>
  CA_INLINE void add_columns(const Group& group, int64_t n, Width width, NextAdapter& next) {
    const int64_t rank = args_.ranks[group.slot];
    const Element* at = b(group.slot) + n;
    Floats sums[rows][vectors] = {};
    for (int64_t r = 0; r < rank; ++r, at += args_.size_out) {
      next.b.prefetch(vectors * kLanes * sizeof(Element) / kLine);
      Floats weights[vectors];
      for (int v = 0; v < vectors; ++v) weights[v] = load_some(at + v * kLanes, width);
      for (int i = 0; i < rows; ++i) {
        const Floats by = splat(hidden_[i * kMaxRank + r]);
        for (int v = 0; v < vectors; ++v) sums[i][v] = fused(by, weights[v], sums[i][v]);
      }
    }
    const Floats scale = splat(args_.scale[group.slot]);
    for (int i = 0; i < std::min<int64_t>(rows, group.count); ++i) {
      for (int v = 0; v < vectors; ++v) {
        const Floats before = load_some(out(group.rows[i]) + n + v * kLanes, width);
        store_some(result(group.rows[i]) + n + v * kLanes, fused(scale, sums[i][v], before), width);
      }
    }
  }

  NextAdapter matrices(int64_t slot) const {
    const int64_t bytes = args_.ranks[slot] * sizeof(Element);
    return {{a(slot), bytes * args_.size_in}, {b(slot), bytes * args_.size_out}};
  }
  const Element* a(int64_t slot) const {
    return static_cast<const Element*>(args_.a) + slot * args_.max_rank * args_.size_in;
  }
  const Element* b(int64_t slot) const {
    return static_cast<const Element*>(args_.b) + slot * args_.max_rank * args_.size_out;
  }
  const Element* out(int64_t row) const {
    return static_cast<const Element*>(args_.out) + row * args_.size_out;
  }
  Element* result(int64_t row) const {
    return static_cast<Element*>(args_.result) + row * args_.size_out;
  }

  const AddLoraArgs& args_;
  float hidden_[kMaxRows * kMaxRank];  // of each row of a group: input x a
};

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
      Adder<float>(*args).run(begin, end);
    } else {
      Adder<BFloat16>(*args).run(begin, end);
    }
  }
}
