// What the machine can do at best: reading the blocks of a table, and multiply-adds.
#include <omp.h>

#include <cstdint>

typedef float Floats __attribute__((vector_size(64), aligned(4), may_alias));

// Adds up all bytes of some blocks of two buffers, as floats, each thread a share of the table. The
// next block is prefetched into a level of the caches while one is read: the fastest of the forms
// that were tried, and which level is best depends on the processor.
template <int level>
float read_blocks(const char* keys, const char* values, const int32_t* table, int64_t count,
                  int64_t bytes, int32_t threads) {
  float total = 0;
#pragma omp parallel num_threads(threads) reduction(+ : total)
  {
    const int64_t id = omp_get_thread_num(), all = omp_get_num_threads();
    const int64_t end = count * (id + 1) / all;
    Floats sums[4] = {};
    for (int64_t i = count * id / all; i < end; ++i) {
      const int64_t after = i + 1 < end ? i + 1 : i;
      const char* blocks[] = {keys + table[i] * bytes, values + table[i] * bytes,
                              keys + table[after] * bytes};
      for (int part = 0; part < 2; ++part)
        for (int64_t at = 0; at < bytes; at += 256)
          for (int line = 0; line < 4; ++line) {
            __builtin_prefetch(blocks[part + 1] + at + 64 * line, 0, 4 - level);
            sums[line] += *reinterpret_cast<const Floats*>(blocks[part] + at + 64 * line);
          }
    }
    const Floats sum = sums[0] + sums[1] + sums[2] + sums[3];
    for (int lane = 0; lane < 16; ++lane) total += sum[lane];
  }
  return total;
}

extern "C" float read_blocks_1(const char* keys, const char* values, const int32_t* table,
                               int64_t count, int64_t bytes, int32_t threads) {
  return read_blocks<1>(keys, values, table, count, bytes, threads);
}

extern "C" float read_blocks_2(const char* keys, const char* values, const int32_t* table,
                               int64_t count, int64_t bytes, int32_t threads) {
  return read_blocks<2>(keys, values, table, count, bytes, threads);
}

// `steps` x 12 multiply-adds of whole vectors of floats on each thread.
extern "C" float multiply_add(int64_t steps, int32_t threads) {
  float total = 0;
#pragma omp parallel num_threads(threads) reduction(+ : total)
  {
    Floats sums[12] = {};
    for (auto& sum : sums) sum += float(threads);
    const Floats factor = Floats{} + 0.999f, term = Floats{} + 0.1f;
    for (int64_t i = 0; i < steps; ++i)
#pragma GCC unroll 12
      for (auto& sum : sums) sum = sum * factor + term;
    for (auto& sum : sums) total += sum[0];
  }
  return total;
}

#if defined(__AVX512BF16__)
#include <immintrin.h>

// The same in products of pairs of bfloat16.
extern "C" float multiply_add_pairs(int64_t steps, int32_t threads) {
  float total = 0;
#pragma omp parallel num_threads(threads) reduction(+ : total)
  {
    __m512 sums[12];
    for (auto& sum : sums) sum = _mm512_set1_ps(float(threads));
    const __m512bh a = (__m512bh)_mm512_set1_epi32(0x3f003f00),
                   b = (__m512bh)_mm512_set1_epi32(0x3d003d00);
    for (int64_t i = 0; i < steps; ++i)
#pragma GCC unroll 12
      for (auto& sum : sums) sum = _mm512_dpbf16_ps(sum, a, b);
    for (auto& sum : sums) total += sum[0];
  }
  return total;
}
#endif
