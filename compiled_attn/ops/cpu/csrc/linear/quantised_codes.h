// Weights of 4, 5, 6 and 8 bits: unpacks their codes and the scales of their groups.
//
// A block is 32 inputs of 16 outputs: eight quads of inputs, each 16 x 4 bytes, an operand of
// vpdpbusd. The bytes of a quad are its inputs 0, 2, 1, 3, so that the 16-bit halves of a lane hold
// adjacent inputs in each byte: operands of bfloat16 dot products. With fewer than 8 bits, byte j
// has the low four bits of a code of quad i and of quad i + 4; after these 256 bytes, 64 * (bits - 4)
// have the rest: 5 bits: bit i is that of quad i; 6: in each half, two bits from 2 i on are those of
// quad i of the half.
#pragma once

#include "linear/pieces.h"
#include "vector/bfloat16.h"

namespace compiled_attn {

constexpr int kQuadBytes = 4 * kPanel, kQuads = 8;  // of a block
constexpr int kBlocksAtOnce = 8;  // unpacked codes stay in L1
constexpr int64_t kAheadBytes = 4096;  // prefetch distance of codes

CA_INLINE void store_codes(void* at, Ints v) { std::memcpy(at, &v, sizeof v); }

// Calls `put(quad, lane, codes)` for each vector of four quads of a block, in order.
template <int bits, int half, class Put>
CA_INLINE void each_quad(const uint8_t* from, const Put& put) {
#pragma GCC unroll 4
  for (int lane = 0; lane < kPanel; lane += kLanes) {
    const uint8_t* at = from + 4 * lane;
    Ints more{};
    if (bits == 5) more = load_as<Ints>(at + 4 * kQuadBytes);
    if (bits == 6) more = load_as<Ints>(at + (4 + half) * kQuadBytes);
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) {
      if constexpr (bits == 8) {
        put(4 * half + q, lane, load_as<Ints>(at + (4 * half + q) * kQuadBytes));
      } else {
        Ints codes = load_as<Ints>(at + q * kQuadBytes) >> 4 * half & 0x0f0f0f0f;
        if (bits == 5) codes |= (more >> (4 * half + q) & 0x01010101) << 4;
        if (bits == 6) codes |= (more >> 2 * q & 0x03030303) << 4;
        put(4 * half + q, lane, codes);
      }
    }
  }
}

template <class Body>
CA_INLINE void with_bits(int bits, const Body& body) {
  if (bits == 4) return body(std::integral_constant<int, 4>());
  if (bits == 5) return body(std::integral_constant<int, 5>());
  if (bits == 6) return body(std::integral_constant<int, 6>());
  body(std::integral_constant<int, 8>());
}

// Calls `put(quad of the first block, lane, codes)` for all vectors of some blocks.
template <class Put>
CA_INLINE void unpack_blocks(const uint8_t* from, int bits, int64_t blocks, const Put& put) {
  with_bits(bits, [&](auto of) {
    for (int64_t b = 0; b < blocks; ++b, from += of.value * kQuadBytes) {
      const auto of_block = [&](int quad, int lane, Ints codes) {
        put.template operator()<of.value>(b * kQuads + quad, lane, codes);
      };
      each_quad<of.value, 0>(from, of_block);
      each_quad<of.value, 1>(from, of_block);
    }
  });
}

inline void unpack_bytes(const uint8_t* from, int bits, int64_t blocks, uint8_t* to) {
  unpack_blocks(from, bits, blocks, [&]<int>(int64_t quad, int lane, Ints codes) {
    store_codes(to + quad * kQuadBytes + 4 * lane, codes);
  });
}

#if defined(__AVX512BW__)
// All codes of six bits as bfloat16.
struct CodeTable {
  uint16_t numbers[64] = {};
  constexpr CodeTable() {
    for (int i = 0; i < 64; ++i) numbers[i] = uint16_t(__builtin_bit_cast(uint32_t, float(i)) >> 16);
  }
};
alignas(64) constexpr CodeTable kCodeTable;
#endif

// The four inputs of a quad as two pairs of bfloat16, which represents codes exactly.
template <int bits>
CA_INLINE void to_pairs(Ints codes, Ints& first, Ints& second) {
#if defined(__AVX512BW__)
  const auto look_up = [](__m512i words) {
    const __m512i low = _mm512_load_si512(kCodeTable.numbers);
    if (bits < 6) return (Ints)_mm512_permutexvar_epi16(words, low);
    const __m512i high = _mm512_load_si512(kCodeTable.numbers + 32);
    return (Ints)_mm512_permutex2var_epi16(low, words, high);
  };
  if constexpr (bits < 8) {
    // A table's index is the lowest bits of a word, whose upper byte does not count.
    first = look_up((__m512i)codes);
    second = look_up(_mm512_srli_epi16((__m512i)codes, 8));
    return;
  }
#endif
  // The lower half of a code as float32 is zero.
  const auto number = [&](int byte) {
    return bit_cast<Ints>(to_float(codes >> 8 * byte & 0xff));
  };
  first = number(2) | number(0) >> 16;
  second = number(3) | number(1) >> 16;
}

// Pairs of bfloat16 of adjacent inputs, [inputs / 2, 16, 2].
inline void unpack_pairs(const uint8_t* from, int bits, int64_t blocks, BFloat16* to) {
  constexpr int kPair = 2 * kPanel;
  unpack_blocks(from, bits, blocks, [&]<int of>(int64_t quad, int lane, Ints codes) {
    Ints first, second;
    to_pairs<of>(codes, first, second);
    store_codes(to + 2 * quad * kPair + 2 * lane, first);
    store_codes(to + (2 * quad + 1) * kPair + 2 * lane, second);
  });
}

// A position in groups that are `per` steps long.
class GroupCounter {
 public:
  GroupCounter(int64_t steps, int64_t groups, int64_t first)
      : per_(int32_t(groups ? steps / groups : 1)),
        group_(int32_t(first) / per_),
        left_(per_ - int32_t(first) % per_) {}
  CA_INLINE int64_t group() const { return group_; }
  CA_INLINE void step() {
    if (--left_ == 0) ++group_, left_ = per_;
  }

 private:
  int32_t per_, group_, left_;
};

// Scales and minima of consecutive groups of a panel, `size` inputs each: 16 or a block.
struct GroupScales {
  float scale[2 * kBlocksAtOnce][kPanel], minimum[2 * kBlocksAtOnce][kPanel];

  // weight: begins with the panel
  void load_groups(const QuantisedWeight& weight, int64_t size_in, int size, int64_t first,
                   int64_t count) {
    GroupCounter of_scale(size_in / size, weight.scale_groups, first);
    GroupCounter of_step(size_in / size, weight.step_groups, first);
    const bool two = weight.kind == kScaleMinimum || weight.kind == kSuperBoth;
    const Floats zero = splat(float(1 << (weight.bits - 1)));
    for (int64_t i = 0; i < count; ++i, of_scale.step(), of_step.step()) {
      const int64_t row = of_scale.group() * (two ? 2 : 1) * kPanel;
      const int64_t step = of_step.group() * kPanel;
      for (int p = 0; p < kPanel; p += kLanes) {
        const auto at = [&](int64_t i) {
          if (weight.scales_are_float32) return load(static_cast<const float*>(weight.scales) + i);
          return load(static_cast<const Float16*>(weight.scales) + i);
        };
        Floats one = at(row + p), least = two ? at(row + kPanel + p) : one * zero;
        if (weight.kind == kScaleZero) {
          least = one * to_float(load_u8(weight.steps + step + p));
        } else if (weight.kind == kSuperScale) {
          one *= load(reinterpret_cast<const int8_t*>(weight.steps) + step + p);
          least = one * zero;
        } else if (weight.kind == kSuperBoth) {
          one *= to_float(load_u8(weight.steps + 2 * step + p));
          least *= to_float(load_u8(weight.steps + 2 * step + kPanel + p));
        }
        store(scale[i] + p, one), store(minimum[i] + p, least);
      }
    }
  }
};

// Prefetches the codes of a piece, block by block of the previous one.
class CodePrefetcher {
 public:
  CodePrefetcher() = default;
  // steps: blocks of the previous piece
  CodePrefetcher(const PackedLinearArgs& next, int64_t steps)
      : at_(next.quantised.codes),
        half_(next.size_out / kPanel * (next.size_in / kCodeBlock) * next.quantised.bits / 2 * 64),
        left_(half_ / 64 + 1),
        step_((left_ + steps - 1) / std::max<int64_t>(steps, 1)) {}

  // Two streams: memory serves two faster than one.
  CA_INLINE void prefetch() {
    for (int64_t i = 0; i < step_ && left_ > 0; ++i, --left_, at_ += 64) {
      __builtin_prefetch(at_, 0, 2);
      __builtin_prefetch(at_ + half_, 0, 2);
    }
  }

 private:
  const uint8_t* at_ = nullptr;
  int64_t half_ = 0, left_ = 0, step_ = 0;  // bytes, lines, lines
};

// Prefetches the scales and steps of some inputs of a panel.
CA_INLINE void prefetch_groups(const QuantisedWeight& panel, int64_t size_in, int64_t k,
                               int64_t inputs) {
  const bool two = panel.kind == kScaleMinimum || panel.kind == kSuperBoth;
  const auto prefetch = [&](const void* base, int64_t groups, int64_t bytes) {
    const auto* at = static_cast<const uint8_t*>(base) + k * groups / size_in * bytes;
    const int64_t all = inputs * groups / size_in * bytes;
    for (int64_t i = 0; i <= all; i += 64) __builtin_prefetch(at + i, 0, 3);
  };
  prefetch(panel.scales, panel.scale_groups,
           (two ? 2 : 1) * kPanel * (panel.scales_are_float32 ? 4 : 2));
  if (panel.steps)
    prefetch(panel.steps, panel.step_groups, (panel.kind == kSuperBoth ? 2 : 1) * kPanel);
}

// Inputs of the smallest group: of a scale, or of a step.
CA_INLINE int group_size(const QuantisedWeight& weight, int64_t size_in) {
  const int64_t groups = std::max(weight.scale_groups, weight.step_groups);
  return groups * 16 == size_in && size_in > 0 ? 16 : kCodeBlock;
}

// Calls `put(input, lane, values of it, values of the next)` for every second input of a panel.
template <int bits, class Put>
CA_INLINE void each_pair(const QuantisedWeight& panel, int64_t size_in, const Put& put) {
  constexpr int64_t kInputs = kBlocksAtOnce * kCodeBlock, kBytes = kQuadBytes * bits;
  const int size = group_size(panel, size_in), of_half = size == 16 ? 1 : 0;
  alignas(64) GroupScales groups;
  const uint8_t* codes = panel.codes;
  for (int64_t k = 0; k < size_in; k += kInputs) {
    const int64_t count = std::min(kInputs, size_in - k);
    groups.load_groups(panel, size_in, size, k / size, count / size);
    for (int64_t i = 0; i < count; i += kCodeBlock, codes += kBytes) {
      for (int line = 0; line < kBytes; line += 64) __builtin_prefetch(codes + kAheadBytes + line);
      const int64_t first = i / kCodeBlock << of_half;
      const auto quad_of = [&](int64_t group) {
        return [&, group](int quad, int lane, Ints four) {
          const Floats scale = load(groups.scale[group] + lane);
          const Floats minimum = load(groups.minimum[group] + lane);
          const auto value = [&](int byte) {
            return to_float(four >> 8 * byte & 0xff) * scale - minimum;
          };
          put(k + i + 4 * quad, lane, value(0), value(2));
          put(k + i + 4 * quad + 2, lane, value(1), value(3));
        };
      };
      each_quad<bits, 0>(codes, quad_of(first));
      each_quad<bits, 1>(codes, quad_of(first + of_half));
    }
  }
}

// Some panels as bfloat16, in the layout of `PackedLinearArgs::weight`.
inline void widen_panels(QuantisedWeight weight, int64_t panels, int64_t size_in, BFloat16* to) {
  with_bits(weight.bits, [&](auto bits) {
    for (; panels > 0; --panels, skip_panels(weight, 1, size_in), to += size_in * kPanel)
      each_pair<bits.value>(weight, size_in, [&](int64_t k, int lane, Floats first, Floats second) {
        store_codes(to + k * kPanel + 2 * lane, round_to_pairs(first, second));
      });
  });
}

template <class Element>
inline void copy_row(QuantisedWeight weight, int64_t size_in, int64_t id, Element* to) {
  skip_panels(weight, id / kPanel, size_in);
  const int64_t row = id % kPanel;
  with_bits(weight.bits, [&](auto bits) {
    each_pair<bits.value>(weight, size_in, [&](int64_t k, int lane, Floats first, Floats second) {
      if (lane != row / kLanes * kLanes) return;
      from_float(first[row % kLanes], to + k), from_float(second[row % kLanes], to + k + 1);
    });
  });
}

}  // namespace compiled_attn
