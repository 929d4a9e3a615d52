// Random steps against attention in doubles: a program of its own, for processors that are
// emulated.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <random>
#include <vector>

#include "abi.h"
#include "vector/elements.h"

namespace {

using namespace compiled_attn;

std::mt19937 random_bits(7);

int64_t between(int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random_bits);
}

template <class Element>
constexpr Dtype dtype_of() {
  if (std::is_same_v<Element, BFloat16>) return kBFloat16;
  if (std::is_same_v<Element, Float16>) return kFloat16;
  if (std::is_same_v<Element, Float8E4M3>) return kFloat8E4M3;
  if (std::is_same_v<Element, Float8E5M2>) return kFloat8E5M2;
  return std::is_same_v<Element, int8_t> ? kInt8 : kFloat32;
}

template <class Element>
std::vector<Element> normal(int64_t n, float factor) {
  std::normal_distribution<float> draw;
  std::vector<Element> values(n);
  for (auto& value : values) from_float(draw(random_bits) * factor, &value);
  return values;
}

template <class Query, class Cached>
struct Case {
  int64_t kv_heads = between(1, 3), group = between(1, 9), dim = between(1, 20) * 8;
  int64_t value_dim = between(0, 1) ? dim : between(1, 70), block_size = between(1, 20);
  std::vector<int32_t> lengths, starts{0}, table;
  int64_t width = 1, blocks = 1, tokens = 0, heads = kv_heads * group;

  PagedAttentionArgs args{};
  std::vector<Query> query, out;
  std::vector<Cached> keys, values;
  std::vector<float> lse, key_scale, value_scale;

  Case() {
    const int64_t requests = between(1, 4);
    for (int64_t r = 0; r < requests; ++r) {
      const int64_t length = between(0, 300);
      lengths.push_back(int32_t(length));
      const int64_t rows =
          between(0, 2) ? between(0, std::min<int64_t>(length, 2)) : between(0, length);
      starts.push_back(starts.back() + int32_t(rows));
      width = std::max(width, (length + block_size - 1) / block_size);
    }
    table.resize(requests * width);
    for (auto& id : table) id = int32_t(blocks++);
    std::shuffle(table.begin(), table.end(), random_bits);
    tokens = starts.back() + between(0, 2);
    fill();
  }

  void fill() {
    const int64_t slots = blocks * block_size * kv_heads;
    const float factor = is_quantised<Cached> ? 20.0f : 1.0f;
    query = normal<Query>(tokens * heads * dim, 1);
    keys = normal<Cached>(slots * dim, factor);
    values = normal<Cached>(slots * value_dim, factor);
    out.resize(tokens * heads * value_dim);
    lse.resize(tokens * heads);
    args.query = {query.data(), heads * dim, dim};
    args.out = out.data(), args.lse = lse.data();
    args.key_cache = {keys.data(), block_size * kv_heads * dim, kv_heads * dim, dim};
    args.value_cache = {values.data(), block_size * kv_heads * value_dim, kv_heads * value_dim,
                        value_dim};
    if (is_quantised<Cached>) {
      key_scale.assign(slots, 0.05f), value_scale.assign(slots, 0.05f);
      args.key_scale = {key_scale.data(), block_size * kv_heads, kv_heads, 1};
      args.value_scale = {value_scale.data(), block_size * kv_heads, kv_heads, 1};
    }
    args.block_table = table.data(), args.table_stride = width, args.table_width = width;
    args.seq_lens = lengths.data(), args.query_start_loc = starts.data();
    args.tokens = tokens, args.requests = int64_t(lengths.size());
    args.num_blocks = blocks, args.block_size = block_size;
    args.heads = heads, args.kv_heads = kv_heads, args.head_dim = dim, args.value_dim = value_dim;
    args.window = between(0, 1) ? between(1, 100) : 0;
    args.softcap = between(0, 2) ? 0.0 : 5.0;
    args.scale = 1 / std::sqrt(double(dim));
    args.query_dtype = dtype_of<Query>(), args.cache_dtype = dtype_of<Cached>();
    args.causal = 1, args.threads = int32_t(between(1, 2));
  }

  double at(const std::vector<Cached>& cache, int64_t slot, int64_t head, int64_t d,
            int64_t n) const {
    const double factor = is_quantised<Cached> ? 0.05f : 1.0;
    return value_of(cache[(slot * kv_heads + head) * n + d]) * factor;
  }

  // The largest difference of a row of the output, in units of the largest value.
  double error(int64_t r, int64_t row, int64_t head) const {
    const int64_t end = std::max<int64_t>(lengths[r] - (starts[r + 1] - starts[r]) + row + 1, 0);
    const int64_t begin = args.window ? std::max<int64_t>(end - args.window, 0) : 0;
    const int64_t token = starts[r] + row, h = head / group;
    std::vector<double> sum(value_dim);
    double total = 0;
    for (int64_t t = begin; t < end; ++t) {
      const int64_t slot = table[r * width + t / block_size] * block_size + t % block_size;
      double score = 0;
      for (int64_t d = 0; d < dim; ++d)
        score +=
            double(value_of(query[(token * heads + head) * dim + d])) * at(keys, slot, h, d, dim);
      score *= args.scale;
      if (args.softcap > 0) score = args.softcap * std::tanh(score / args.softcap);
      const double weight = std::exp(score);
      total += weight;
      for (int64_t d = 0; d < value_dim; ++d) sum[d] += weight * at(values, slot, h, d, value_dim);
    }
    double worst = 0;
    for (int64_t d = 0; d < value_dim; ++d) {
      const double got = value_of(out[(token * heads + head) * value_dim + d]);
      const double difference = std::abs(got - (total > 0 ? sum[d] / total : 0));
      worst = std::max(worst, difference == difference ? difference / 4 : INFINITY);
    }
    return worst;
  }

  double run() {
    int64_t status[4];
    if (compiled_attn_paged_attention(&args, status)) return INFINITY;
    double worst = 0;
    for (size_t r = 0; r < lengths.size(); ++r)
      for (int64_t row = 0; row < starts[r + 1] - starts[r]; ++row)
        for (int64_t head = 0; head < heads; ++head) worst = std::max(worst, error(r, row, head));
    return worst;
  }
};

template <class Query, class Cached>
bool holds(const char* name, int cases, double allowed) {
  double worst = 0;
  for (int i = 0; i < cases; ++i) worst = std::max(worst, Case<Query, Cached>().run());
  std::printf("%-22s %.2e of %.0e allowed\n", name, worst, allowed);
  return worst <= allowed;
}

}  // namespace

int main(int argc, char** argv) {
  const int cases = argc > 1 ? std::atoi(argv[1]) : 20;
  bool fine = holds<float, float>("float32", cases, 1e-6);
  fine &= holds<BFloat16, BFloat16>("bfloat16", cases, 4e-3);
  fine &= holds<Float16, Float16>("float16", cases, 5e-4);
  fine &= holds<float, int8_t>("float32, int8", cases, 1e-6);
  fine &= holds<BFloat16, Float8E4M3>("bfloat16, float8_e4m3", cases, 4e-3);
  fine &= holds<Float16, Float8E5M2>("float16, float8_e5m2", cases, 5e-4);
  return fine ? 0 : 1;
}
