// SIMD vectors for the instruction set of this translation unit.
//
// Uses the compilers' vector extensions, and intrinsics only where these lack an operation. Builds
// with -ffp-contract=fast, so a * b + c becomes a fused multiply-add.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace compiled_attn {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

#define CA_INLINE inline __attribute__((always_inline))
#define CA_NOINLINE __attribute__((noinline))

// For functions called rarely in loops whose accumulators fill the registers: inlines them only
// where 32 registers leave room for their constants.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRegisters = 32;
#define CA_INLINE_IF_REGISTERS CA_INLINE
#else
constexpr int kRegisters = 16;
#define CA_INLINE_IF_REGISTERS CA_NOINLINE
#endif

typedef float Floats __attribute__((vector_size(4 * kLanes), may_alias));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes), may_alias));
typedef float Floats4 __attribute__((vector_size(16), may_alias));

template <class Vector, class Element>
CA_INLINE Vector load_as(const Element* at) {
  Vector v;
  std::memcpy(&v, at, sizeof v);
  return v;
}

CA_INLINE Floats load(const float* at) { return load_as<Floats>(at); }
template <class Vector>  // Floats or Floats4, which may be the same
CA_INLINE void store(float* at, Vector v) {
  std::memcpy(at, &v, sizeof v);
}
CA_INLINE Floats splat(float x) { return x - Floats{}; }  // x - 0 keeps -0, unlike 0 + x
CA_INLINE Ints splat(int32_t x) { return x + Ints{}; }

template <class To, class From>
CA_INLINE To bit_cast(From v) {
  static_assert(sizeof(To) == sizeof(From), "same bits");
  To to;
  std::memcpy(&to, &v, sizeof to);
  return to;
}

// Forces the vector into a register: GCC otherwise reloads an operand at each use, and a load costs
// as much as a multiply-add.
template <class Vector>
CA_INLINE Vector in_register(Vector v) {
#if defined(__AVX512F__)
  static_assert(sizeof v == 64, "one register");
  asm("" : "+v"(v));
#endif
  return v;
}

// a * b + c, rounded once where the processor can: where a row must have the same bits in several
// functions, which the compiler may contract differently.
CA_INLINE Floats fused(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}

CA_INLINE Floats select(Ints mask, Floats yes, Floats no) {
  return bit_cast<Floats>((mask & bit_cast<Ints>(yes)) | (~mask & bit_cast<Ints>(no)));
}

// Returns b where either is NaN.
template <class Vector>
CA_INLINE Vector max(Vector a, Vector b) {
#if defined(__AVX512F__)
  if constexpr (sizeof a == 64) return _mm512_max_ps(a, b);
#endif
#if defined(__AVX2__)
  if constexpr (sizeof a == 32) return _mm256_max_ps(a, b);
#endif
  const auto mask = a > b;
  return bit_cast<Vector>((mask & bit_cast<decltype(a > b)>(a)) |
                         (~mask & bit_cast<decltype(a > b)>(b)));
}

// Lane i of the result is lane Index::at(i) of the concatenation of a and b.
template <class Index, int... i>
CA_INLINE Floats shuffle(Floats a, Floats b, std::integer_sequence<int, i...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, Index::at(i)...);
#else
  return __builtin_shuffle(a, b, Ints{Index::at(i)...});
#endif
}

template <class Index>
CA_INLINE Floats shuffle(Floats a, Floats b) {
  return shuffle<Index>(a, b, std::make_integer_sequence<int, kLanes>{});
}

// In each quarter of four lanes: a0 b0 a1 b1, or with Half 1 a2 b2 a3 b3.
template <int Half>
struct UnpackLanes {
  static constexpr int at(int i) { return i / 4 * 4 + 2 * Half + i % 4 / 2 + i % 2 * kLanes; }
};

// In each quarter: a0 a1 b0 b1, or with Half 1 a2 a3 b2 b3.
template <int Half>
struct UnpackPairs {
  static constexpr int at(int i) { return i / 4 * 4 + 2 * Half + i % 2 + i % 4 / 2 * kLanes; }
};

// Reduces the quarters of four lanes to one.
template <class Join>
CA_INLINE Floats4 reduce_quarters(Floats v, [[maybe_unused]] const Join& join) {
#if defined(__AVX512F__)
  const __m256 half = join(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  return join(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
#elif defined(__AVX2__)
  return join(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
#else
  return bit_cast<Floats4>(v);
#endif
}

// Reduces each of four vectors to one lane of the result.
template <class Join>
CA_INLINE Floats4 hreduce(Floats a, Floats b, Floats c, Floats d, const Join& join) {
  const Floats ab = join(shuffle<UnpackLanes<0>>(a, b), shuffle<UnpackLanes<1>>(a, b));
  const Floats cd = join(shuffle<UnpackLanes<0>>(c, d), shuffle<UnpackLanes<1>>(c, d));
  return reduce_quarters(join(shuffle<UnpackPairs<0>>(ab, cd), shuffle<UnpackPairs<1>>(ab, cd)),
                         join);
}

CA_INLINE Floats4 hsum(Floats a, Floats b, Floats c, Floats d) {
  return hreduce(a, b, c, d, [](auto x, auto y) { return x + y; });
}

CA_INLINE Floats4 hmax(Floats a, Floats b, Floats c, Floats d) {
  return hreduce(a, b, c, d, [](auto x, auto y) { return max(x, y); });
}

CA_INLINE Ints ramp() {
  Ints v{};
  for (int i = 0; i < kLanes; ++i) v[i] = i;
  return v;
}

CA_INLINE Floats to_float(Ints v) { return __builtin_convertvector(v, Floats); }

// Rounds to nearest even.
#if defined(__AVX512F__)
CA_INLINE Ints round_to_int(Floats v) { return bit_cast<Ints>(_mm512_cvtps_epi32(v)); }
CA_INLINE Ints max(Ints a, Ints b) {
  return bit_cast<Ints>(_mm512_max_epi32((__m512i)a, (__m512i)b));
}
CA_INLINE int32_t hmax(Ints v) { return _mm512_reduce_max_epi32((__m512i)v); }
#elif defined(__AVX2__)
CA_INLINE Ints round_to_int(Floats v) { return bit_cast<Ints>(_mm256_cvtps_epi32(v)); }
CA_INLINE Ints max(Ints a, Ints b) {
  return bit_cast<Ints>(_mm256_max_epi32((__m256i)a, (__m256i)b));
}
#endif
#if !defined(__AVX512F__)
CA_INLINE int32_t hmax(Ints v) {
  int32_t result = v[0];
  for (int i = 1; i < kLanes; ++i) result = v[i] > result ? v[i] : result;
  return result;
}
#endif

CA_INLINE void transpose(Floats4 (&rows)[4]) {
  Floats4 columns[4];
  for (int i = 0; i < 4; ++i) columns[i] = Floats4{rows[0][i], rows[1][i], rows[2][i], rows[3][i]};
  for (int i = 0; i < 4; ++i) rows[i] = columns[i];
}

// Transposes a kLanes x kLanes matrix.
template <int Step>
struct Low {
  static constexpr int at(int i) { return i & Step ? kLanes + i - Step : i; }
};
template <int Step>
struct High {
  static constexpr int at(int i) { return i & Step ? kLanes + i : i + Step; }
};

template <int Step = 1>
CA_INLINE void transpose(Floats (&rows)[kLanes]) {
  for (int i = 0; i < kLanes; ++i) {
    if (i & Step) continue;
    const Floats a = rows[i], b = rows[i + Step];
    rows[i] = shuffle<Low<Step>>(a, b);
    rows[i + Step] = shuffle<High<Step>>(a, b);
  }
  if constexpr (2 * Step < kLanes) transpose<2 * Step>(rows);
}

}  // namespace compiled_attn
