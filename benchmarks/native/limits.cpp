// What the machine can do at best: reading the blocks of a table, and multiply-adds.
#include <omp.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <cstdint>

typedef float Floats __attribute__((vector_size(64), aligned(4), may_alias));

// Adds up all bytes of some blocks of two buffers, as floats, each thread a share of the table. The
// next block is prefetched into a level of the caches while one is read: the fastest of the
// variants that were tried; which level is best depends on the processor.
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

namespace {

// A register: its bytes, and what assembly calls one.
#if defined(__AVX512F__)
constexpr int kBytes = 64;
#elif defined(__AVX__)
constexpr int kBytes = 32;
#else
constexpr int kBytes = 16;
#endif
#if defined(__x86_64__)
#define REGISTER "x"
#else
#define REGISTER "w"
#endif

// `steps` x 12 times sum = add(sum), each sum one register, on each thread.
template <class Sum, class Add>
void repeat(int64_t steps, int32_t threads, const Add& add) {
#pragma omp parallel num_threads(threads)
  {
    Sum sums[12] = {};
    // Each may be another from here on: of equal ones GCC would compute one.
    for (auto& sum : sums) asm volatile("" : "+" REGISTER(sum));
    for (int64_t i = 0; i < steps; ++i)
#pragma GCC unroll 12
      for (auto& sum : sums) sum = add(sum);
    for (auto& sum : sums) asm volatile("" : : REGISTER(sum));  // as if it was used
  }
}

}  // namespace

// Multiply-adds of whole vectors of floats; returns how many each of `steps` x 12 is.
extern "C" int32_t multiply_add(int64_t steps, int32_t threads) {
  typedef float Lanes __attribute__((vector_size(kBytes)));
  const Lanes factor = Lanes{} + 0.999f, term = Lanes{} + 0.1f;
  repeat<Lanes>(steps, threads, [=](Lanes sum) { return sum * factor + term; });
  return kBytes / 4;
}

#if defined(__AVX512BF16__)
// The same in products of pairs of bfloat16.
extern "C" int32_t multiply_add_pairs(int64_t steps, int32_t threads) {
  const __m512bh a = (__m512bh)_mm512_set1_epi32(0x3f003f00),
                 b = (__m512bh)_mm512_set1_epi32(0x3d003d00);
  repeat<__m512>(steps, threads, [=](__m512 sum) { return _mm512_dpbf16_ps(sum, a, b); });
  return 32;
}
#endif

// The same of integers of 16 bits with codes of 8, as the kernel multiplies int8: split in two
// bytes, or widened.
#if defined(__AVX512VNNI__)
extern "C" int32_t multiply_add_codes(int64_t steps, int32_t threads) {
  const __m512i codes = _mm512_set1_epi32(0x01020304), bytes = _mm512_set1_epi32(0x04030201);
  repeat<__m512i>(steps, threads,
                  [=](__m512i sum) { return _mm512_dpbusd_epi32(sum, codes, bytes); });
  return 32;
}
#elif defined(__AVX2__)
extern "C" int32_t multiply_add_codes(int64_t steps, int32_t threads) {
  const __m256i codes = _mm256_set1_epi32(0x00010002), int16s = _mm256_set1_epi32(0x00030004);
  repeat<__m256i>(steps, threads, [=](__m256i sum) {
    __m256i product;  // as written: GCC would make one for all sums
    asm("vpmaddwd %2, %3, %1\n\tvpaddd %1, %0, %0"
        : "+x"(sum), "=&x"(product)
        : "x"(codes), "x"(int16s));
    return sum;
  });
  return 16;
}
#endif
