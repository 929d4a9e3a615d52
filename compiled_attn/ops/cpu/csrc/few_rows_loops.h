// The inner loops over keys and values where rows are few.
#pragma once

#include "few_rows_math.h"
#include "prefetch.h"
#include "scores.h"

namespace compiled_attn {

// Cache lines that some elements fill, at least one.
template <class Math>
constexpr int lines_of(int elements) {
  return std::max<int>(elements * sizeof(typename Math::Element) / kLine, 1);
}

// Products of `rows` queries [rows, dim] with some keys: out [rows, kChunk].
//
// The inner loop asks for as many lines further on as it reads here: in a burst they would queue up
// before the loads that are waited for.
template <int rows, class Math>
CA_INLINE void products(const Math& math, const typename Math::Query* query, int64_t dim,
                        const typename Math::Element* const* keys, float* out, Ahead ahead) {
  constexpr int count = Math::kKeys, at_once = 4 / count;  // rows of a vector of sums
  static_assert(4 % count == 0, "a vector of sums is whole rows");
  Floats sum[padded<at_once>(rows) * count] = {};
  for (int64_t d = 0; d < dim; d += Math::kWide) {
    prefetch<lines_of<Math>(count * Math::kWide)>(ahead +
                                                  count * d * sizeof(typename Math::Element));
    typename Math::Key key[count];
    for (int i = 0; i < count; ++i) key[i] = math.key(keys[i] + d);
    for (int r = 0; r < rows; ++r) {
      const auto q = math.query(query + r * dim + d);
      for (int i = 0; i < count; ++i)
        sum[r * count + i] = math.product(sum[r * count + i], key[i], q);
    }
  }
  for (int r = 0; r < rows; r += at_once) {
    const Floats* four = sum + r * count;
    const Floats4 s = sums(four[0], four[1], four[2], four[3]);
    for (int i = 0; i < at_once && r + i < rows; ++i)
      std::memcpy(out + (r + i) * kChunk, reinterpret_cast<const float*>(&s) + i * count,
                  count * sizeof(float));
  }
}

// Adds kValues values, weighted, to `width` vectors of each row of sums [rows, dim].
template <int rows, int width, class Math>
CA_INLINE void add_slice(const Math& math, const typename Math::Weights* weights, int64_t first,
                         const typename Math::Element* const* values, int64_t d, float* sums,
                         int64_t dim, Ahead ahead) {
  using Element = typename Math::Element;
  constexpr int step = Math::kTokens * width * kLanes;  // elements
  Floats sum[rows][width];
  for (int r = 0; r < rows; ++r)
    for (int w = 0; w < width; ++w) sum[r][w] = load(sums + r * dim + d + w * kLanes);
  for (int t = 0; t < Math::kValues; t += Math::kTokens) {
    prefetch<lines_of<Math>(step)>(ahead + t / Math::kTokens * step * sizeof(Element));
    const Element* tokens[Math::kTokens];
    for (int i = 0; i < Math::kTokens; ++i) tokens[i] = values[t + i] + d;
    typename Math::Value value[width];
    math.values(tokens, value);
    for (int r = 0; r < rows; ++r) {
      const auto weight = math.weight(weights[r].of + first + t);
      for (int w = 0; w < width; ++w) sum[r][w] = math.weighted(sum[r][w], value[w], weight);
    }
  }
  for (int r = 0; r < rows; ++r)
    for (int w = 0; w < width; ++w) store(sums + r * dim + d + w * kLanes, sum[r][w]);
}

// The same for whole rows; `first` is the place of the values in their chunk.
template <int rows, class Math>
CA_INLINE void weighted_sums(const Math& math, const typename Math::Weights* weights, int64_t first,
                             const typename Math::Element* const* values, float* sums, int64_t dim,
                             const Ahead* ahead) {
  static_assert(Math::kRun == Math::kValues, "one run");
  static_assert(kScoreStep % Math::kValues == 0, "weights are zero up to a score step only");
  constexpr int step = Math::kWide / kLanes, width = kRegisters == 32 ? 4 : 2;
  int64_t d = 0;
  for (; d + width * kLanes <= dim; d += width * kLanes)
    add_slice<rows, width>(math, weights, first, values, d, sums, dim,
                           *ahead + Math::kValues * d * sizeof(typename Math::Element));
  for (; d < dim; d += step * kLanes)
    add_slice<rows, step>(math, weights, first, values, d, sums, dim,
                          *ahead + Math::kValues * d * sizeof(typename Math::Element));
}

}  // namespace compiled_attn
