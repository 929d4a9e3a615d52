// Layers with quantised weights in SIMD registers.
//
// Codes are multiplied as they are, exactly: sums of a group are scaled once. Several rows share
// unpacked codes; a single one multiplies them as they are unpacked.
#pragma once

#include <optional>

#include "linear/linear_simd.h"
#include "linear/quantised_codes.h"
#include "linear/quantised_tiles.h"

namespace compiled_attn {

// Products of bytes, four at a time: inputs are int8 with a scale per block.
struct Int8Products {
  using Input = int8_t;
  using Weight = uint8_t;
  using Sum = Ints;
  static constexpr int kInputs = 4;
  static CA_INLINE Ints weights(const uint8_t* at) { return load_as<Ints>(at); }
  static CA_INLINE Ints added(Ints sum, Ints codes, const int8_t* inputs) {
    int32_t quad;
    std::memcpy(&quad, inputs, sizeof quad);
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, _mm512_set1_epi32(quad));
#elif defined(__AVX512BW__)
    // By nibbles: sums of two products of bytes could exceed 16 bits.
    const __m512i x = _mm512_set1_epi32(quad), all = (__m512i)codes;
    const __m512i mask = _mm512_set1_epi8(15);
    const __m512i low = _mm512_maddubs_epi16(_mm512_and_si512(all, mask), x);
    const __m512i high = _mm512_maddubs_epi16(_mm512_and_si512(_mm512_srli_epi16(all, 4), mask), x);
    return sum + (Ints)_mm512_madd_epi16(low, _mm512_set1_epi16(1)) +
           (Ints)_mm512_madd_epi16(high, _mm512_set1_epi16(16));
#elif defined(__AVX2__)
    const __m256i x = _mm256_set1_epi32(quad), all = (__m256i)codes, mask = _mm256_set1_epi8(15);
    const __m256i low = _mm256_maddubs_epi16(_mm256_and_si256(all, mask), x);
    const __m256i high = _mm256_maddubs_epi16(_mm256_and_si256(_mm256_srli_epi16(all, 4), mask), x);
    return sum + (Ints)_mm256_madd_epi16(low, _mm256_set1_epi16(1)) +
           (Ints)_mm256_madd_epi16(high, _mm256_set1_epi16(16));
#else
    for (int i = 0; i < 4; ++i) sum += (codes >> 8 * i & 0xff) * splat(int32_t{inputs[i]});
    return sum;
#endif
  }
  template <int>
  static CA_INLINE Ints added_quad(Ints sum, Ints codes, const int8_t* inputs) {
    return added(sum, codes, inputs);
  }
  static void unpack(const QuantisedWeight& weight, const uint8_t* codes, int64_t blocks,
                     uint8_t* to) {
    unpack_bytes(codes, weight.bits, blocks, to);
  }
};

// Products of codes as bfloat16 by one of the structs of linear_simd.h.
template <class Dot>
struct CodeProducts : Dot {
  using Sum = Floats;
  template <int bits>
  static CA_INLINE Floats added_quad(Floats sum, Ints codes, const typename Dot::Input* inputs) {
    Ints first, second;
    to_pairs<bits>(codes, first, second);
    sum = Dot::added(sum, Dot::weights(first), inputs);
    return Dot::added(sum, Dot::weights(second), inputs + 2);
  }
  static void unpack(const QuantisedWeight& weight, const uint8_t* codes, int64_t blocks,
                     BFloat16* to) {
    unpack_pairs(codes, weight.bits, blocks, to);
  }
};

CA_INLINE Floats as_floats(Floats v) { return v; }
CA_INLINE Floats as_floats(Ints v) { return to_float(v); }

// Rows of the input, float32 or bfloat16, converted where `Products` need it, with their sums over
// groups.
template <class Products>
class GroupedInputs {
 public:
  using Input = typename Products::Input;
  static constexpr bool kIsInt8 = std::is_same_v<Input, int8_t>;

  GroupedInputs(const PackedLinearArgs& args, Scratch& scratch)
      : args_(args), stride_(args.input_row), blocks_(args.size_in / kCodeBlock) {
    rows_ = static_cast<const Input*>(args.input);
    if (kIsInt8 || is_float32() != std::is_same_v<Input, float>) {
      stride_ = args.size_in;
      scratch.take(own_, args.rows * stride_);
      rows_ = own_;
    }
    scratch.take(scales_, kIsInt8 ? args.rows * blocks_ : 0);
    scratch.take(sums_, 3 * args.rows * blocks_);
  }

  // Converts one thread's share, before any thread multiplies.
  void prepare(int thread, int threads) const {
    for (int64_t i = thread; i < args_.rows; i += threads) {
      const int64_t from = i * args_.input_row;
      for (int64_t b = 0; b < blocks_; ++b) {
        alignas(64) float block[kCodeBlock];
        if (is_float32())
          std::memcpy(block, static_cast<const float*>(args_.input) + from + b * kCodeBlock,
                      sizeof block);
        else
          to_floats(static_cast<const BFloat16*>(args_.input) + from + b * kCodeBlock, kCodeBlock,
                    block);
        if constexpr (kIsInt8)
          quantise(block, own_ + i * stride_ + b * kCodeBlock, scales_ + i * blocks_ + b);
        else if (own_)
          std::memcpy(static_cast<void*>(own_ + i * stride_ + b * kCodeBlock), block, sizeof block);
        Floats sums[2];
        for (int half = 0; half < 2; ++half) {
          sums[half] = load(block + 16 * half);
          for (int k = kLanes; k < 16; k += kLanes) sums[half] += load(block + 16 * half + k);
        }
        const Floats4 halves = hsum(sums[0], sums[1], Floats{}, Floats{});
        sums_of(i, 16)[2 * b] = halves[0], sums_of(i, 16)[2 * b + 1] = halves[1];
        sums_of(i, kCodeBlock)[b] = halves[0] + halves[1];
      }
    }
  }

  CA_INLINE const Input* row(int64_t i) const { return rows_ + i * stride_; }
  CA_INLINE int64_t stride() const { return stride_; }
  // Scale of each block of a row of int8.
  CA_INLINE const float* scales(int64_t row) const { return scales_ + row * blocks_; }
  // Sums of a row over each group of 16 inputs, or of a block.
  CA_INLINE float* sums_of(int64_t row, int size) const {
    return sums_ + row * sums_stride() + (size == 16 ? 0 : 2 * blocks_);
  }
  CA_INLINE int64_t sums_stride() const { return 3 * blocks_; }
  CA_INLINE int64_t blocks() const { return blocks_; }

 private:
  bool is_float32() const { return args_.dtype == kFloat32; }

  // Rounds a block to int8, also in place, in the order of a quad's bytes. A block with a number
  // that is not finite has the scale NaN.
  static CA_INLINE void quantise(float* block, int8_t* to, float* scale) {
    Ints largest{};
    for (int k = 0; k < kCodeBlock; k += kLanes)
      largest = max(largest, bit_cast<Ints>(load(block + k)) & 0x7fffffff);
    const float size = bit_cast<float>(hmax(largest));
    const bool is_finite = size < INFINITY;
    *scale = is_finite ? size / 127 : NAN;
    const float inverse = is_finite && size > 0x1p-118f ? 127 / size : 0;
    for (int k = 0; k < kCodeBlock; k += kLanes) {
      // The lowest bits of the sum are the nearest integer.
      constexpr float kShift = 0x1.8p23f;
      const Floats finite = is_finite ? load(block + k) : Floats{};
      const Floats shifted = finite * splat(inverse) + splat(kShift);
      store(block + k, (shifted - splat(kShift)) * splat(*scale));
      store_quads(to + k, bit_cast<Ints>(shifted));
    }
  }

  // Stores the lowest byte of each lane, in the order of a quad's bytes.
  static CA_INLINE void store_quads(int8_t* to, Ints v) {
    // GCC would convert lane by lane.
#if defined(__AVX512F__)
    const __m128i order = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
    const __m128i bytes = _mm_shuffle_epi8(_mm512_cvtepi32_epi8((__m512i)v), order);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
#elif defined(__AVX2__)
    const __m256i first = _mm256_set1_epi32(0x0c040800);  // bytes of four lanes
    const __m256i bytes = _mm256_shuffle_epi8((__m256i)v, first);
    const int32_t quads[2] = {_mm256_extract_epi32(bytes, 0), _mm256_extract_epi32(bytes, 4)};
    std::memcpy(to, quads, sizeof quads);
#else
    typedef uint32_t Quads __attribute__((vector_size(kLanes)));
    Quads quads = bit_cast<Quads>(__builtin_convertvector(v, I8s));
    quads = (quads & 0xff0000ff) | (quads & 0xff00) << 8 | (quads >> 8 & 0xff00);
    std::memcpy(to, &quads, sizeof quads);
#endif
  }

  const PackedLinearArgs& args_;
  int64_t stride_, blocks_;
  const Input* rows_;
  Input* own_ = nullptr;
  float *scales_ = nullptr, *sums_ = nullptr;
};

template <class Products>
class QuantisedSimd {
 public:
  using Input = typename Products::Input;
  using Inputs = GroupedInputs<Products>;

  // Panels per piece, given those of a thread: this piece and the next must fit L2.
  static int64_t panels(const PackedLinearArgs& layer, int64_t of_thread) {
    constexpr int64_t kBytes = 160 * 1024;
    const int64_t most = of_thread < 8 ? 4 : 8;
    return std::clamp(kBytes / (layer.size_in * layer.quantised.bits * kPanel / 8 + 1), int64_t{1}, most);
  }
  // Floats of sums that a worker needs, for pieces of at most `rows` rows.
  static int64_t room(int64_t rows) { return rows * kPanel; }

  QuantisedSimd(const Inputs& inputs, float* sums) : inputs_(inputs), sums_(sums) {}

  // Computes the outputs for some rows, panel by panel. Prefetches `next`, which may be null.
  void run(const PackedLinearArgs& layer, int64_t begin, int64_t end, const PackedLinearArgs* next) {
    size_in_ = layer.size_in, begin_ = begin, end_ = end;
    group_ = group_size(layer.quantised, size_in_);
    const int64_t panels = layer.size_out / kPanel, blocks = size_in_ / kCodeBlock;
    const int64_t parts = (blocks + kBlocksAtOnce - 1) / kBlocksAtOnce;
    ahead_ = next ? CodePrefetcher(*next, panels * blocks) : CodePrefetcher();
    for (int64_t panel = 0; panel < panels; ++panel) {
      std::memset(sums_, 0, (end - begin) * kPanel * sizeof(float));
      for (int64_t i = 0; i < parts; ++i) {
        const int64_t first = i * blocks / parts;
        add_part(layer.products, Part(layer, panel, first, (i + 1) * blocks / parts - first));
      }
      for (int64_t r = 0; r < end - begin; ++r)
        finish(layer, begin + r, panel * kPanel, sums_ + r * kPanel);
    }
  }

 private:
  static constexpr int kVectors = kPanel / kLanes;
  static constexpr int kRows = kRegisters == 32 && kVectors == 1 ? 8 : 4;
  using Weight = typename Products::Weight;
  using Sum = typename Products::Sum;

  static void finish(const PackedLinearArgs& layer, int64_t row, int64_t column,
                     const float* sums) {
    const auto put = [&](auto* out) {
      using Element = std::remove_pointer_t<decltype(out)>;
      store_panel(sums, epilogue_of<Element>(layer).from(column), out + row * layer.out_row + column);
    };
    if (layer.dtype == kFloat32) return put(static_cast<float*>(layer.out));
    put(static_cast<BFloat16*>(layer.out));
  }

  // Some blocks of a panel.
  struct Part {
    Part(const PackedLinearArgs& layer, int64_t panel, int64_t first, int64_t count)
        : weight(layer.quantised), k(first * kCodeBlock), blocks(count) {
      skip_panels(weight, panel, layer.size_in);
      codes = weight.codes + first * kQuadBytes * weight.bits;
    }

    QuantisedWeight weight;
    const uint8_t* codes;
    int64_t k, blocks;
  };

  // Adds the products of a part.
  void add_part(int products, const Part& part) {
    const int64_t inputs = part.blocks * kCodeBlock;
    prefetch_groups(part.weight, size_in_, part.k + inputs, inputs);
    groups_.load_groups(part.weight, size_in_, group_, part.k / group_, inputs / group_);
    if (end_ - begin_ == 1)
      return with_bits(part.weight.bits, [&](auto bits) {
        if (group_ == 16) return one_row<bits.value, 16>(part);
        one_row<bits.value, kCodeBlock>(part);
      });
    for (int64_t b = 0; b < part.blocks; ++b) ahead_.prefetch();
    Products::unpack(part.weight, part.codes, part.blocks, weights_);
    const bool in_tiles = products == kAmxTiles;
    if (group_ == 16) return all_rows<16>(in_tiles, part.k, inputs);
    all_rows<kCodeBlock>(in_tiles, part.k, inputs);
  }

  template <int group>
  void all_rows(bool in_tiles, int64_t k, int64_t inputs) {
    int64_t row = begin_;
    float* sums = sums_;
#if CA_HAS_TILES
    if constexpr (Inputs::kIsInt8)
      for (; in_tiles && row + kTile <= end_; row += kTile, sums += kTile * kPanel)
        block_in_tiles<group>(k, inputs, row, sums);
#endif
    down<kRows, group>(k, inputs, row, sums);
  }

  // Adds scaled sums over a group to those of a row.
  CA_INLINE void add_group(Floats (&all)[kVectors], const Sum (&sums)[kVectors], int64_t g,
                           float input_scale, float input_sum) const {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      Floats products = as_floats(sums[v]);
      if constexpr (Inputs::kIsInt8) products *= splat(input_scale);
      const Floats more = all[v] + products * load(groups_.scale[g] + v * kLanes);
      all[v] = more - splat(input_sum) * load(groups_.minimum[g] + v * kLanes);
    }
  }

  // The only row: multiplies codes as they are unpacked.
  template <int bits, int group>
  CA_NOINLINE void one_row(const Part& part) {
    const int64_t k = part.k, blocks = part.blocks;
    CodePrefetcher ahead = ahead_;
    const uint8_t* codes = part.codes;
    const Input* input = inputs_.row(begin_) + k;
    const float* input_sums = inputs_.sums_of(begin_, group) + k / group;
    const float* input_scales = Inputs::kIsInt8 ? inputs_.scales(begin_) + k / kCodeBlock : input_sums;
    Floats all[kVectors];
    for (int v = 0; v < kVectors; ++v) all[v] = load(sums_ + v * kLanes);
    for (int64_t b = 0; b < blocks; ++b, codes += bits * kQuadBytes, input += kCodeBlock) {
      ahead.prefetch();
      Sum of_group[kVectors] = {};
      const auto add = [&](int quad, int lane, Ints each) {
        Sum& sum = of_group[lane / kLanes];
        sum = Products::template added_quad<bits>(sum, each, input + 4 * quad);
      };
      each_quad<bits, 0>(codes, add);
      if constexpr (group == 16) {
        add_group(all, of_group, 2 * b, input_scales[b], input_sums[2 * b]);
        for (Sum& sum : of_group) sum = Sum{};
      }
      each_quad<bits, 1>(codes, add);
      const int64_t g = group == 16 ? 2 * b + 1 : b;
      add_group(all, of_group, g, input_scales[b], input_sums[g]);
    }
    for (int v = 0; v < kVectors; ++v) store(sums_ + v * kLanes, all[v]);
    ahead_ = ahead;
  }

  template <int rows, int group>
  void down(int64_t k, int64_t inputs, int64_t row, float* sums) {
    for (; row + rows <= end_; row += rows, sums += rows * kPanel)
      block<rows, group>(k, inputs, row, sums);
    if constexpr (rows > 1) down<rows == 8 ? 4 : 1, group>(k, inputs, row, sums);
  }

  // Some rows by unpacked codes.
  template <int rows, int group>
  CA_NOINLINE void block(int64_t k, int64_t inputs, int64_t row, float* sums) const {
    const int64_t input_row = inputs_.stride(), sums_row = inputs_.sums_stride();
    const Input* input = inputs_.row(row) + k;
    const float* input_sums = inputs_.sums_of(row, group) + k / group;
    const float* input_scales = Inputs::kIsInt8 ? inputs_.scales(row) + k / kCodeBlock : input_sums;
    const Weight* weight = weights_;
    Floats all[rows][kVectors];
    for (int r = 0; r < rows; ++r)
      for (int v = 0; v < kVectors; ++v) all[r][v] = load(sums + r * kPanel + v * kLanes);
    for (int64_t g = 0; g < inputs / group; ++g) {
      Sum of_group[rows][kVectors] = {};
#pragma GCC unroll 2
      for (int i = 0; i < group; i += Products::kInputs) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          const auto codes = Products::weights(weight + v * kLanes * Products::kInputs);
#pragma GCC unroll 8
          for (int r = 0; r < rows; ++r)
            of_group[r][v] = Products::added(of_group[r][v], codes, input + r * input_row);
        }
        weight += Products::kInputs * kPanel, input += Products::kInputs;
      }
#pragma GCC unroll 8
      for (int r = 0; r < rows; ++r)
        add_group(all[r], of_group[r], g, input_scales[r * inputs_.blocks() + g * group / kCodeBlock],
                  input_sums[r * sums_row + g]);
    }
    for (int r = 0; r < rows; ++r)
      for (int v = 0; v < kVectors; ++v) store(sums + r * kPanel + v * kLanes, all[r][v]);
  }

#if CA_HAS_TILES
  // kTile rows by unpacked codes: tiles multiply a group while vectors scale the previous one.
  template <int group>
  CA_NOINLINE void block_in_tiles(int64_t k, int64_t inputs, int64_t row, float* sums) {
    const int64_t stride = inputs_.stride(), sums_row = inputs_.sums_stride();
    const int8_t* input = inputs_.row(row) + k;
    const float* input_sums = inputs_.sums_of(row, group) + k / group;
    const float* input_scales = inputs_.scales(row) + k / kCodeBlock;
    if (!tiles_) tiles_.emplace();
    Floats all[kTile][kVectors];
#pragma GCC unroll 16
    for (int r = 0; r < kTile; ++r)
      for (int v = 0; v < kVectors; ++v) all[r][v] = load(sums + r * kPanel + v * kLanes);
    const int64_t count = inputs / group;
    tiles_->template multiply<group>(0, input, stride, weights_);
    for (int64_t g = 0; g < count; ++g) {
      if (g + 1 < count)
        tiles_->template multiply<group>((g + 1) % 2, input + (g + 1) * group, stride,
                                         weights_ + (g + 1) * group * kPanel);
      const int32_t* products = tiles_->sums[g % 2];
#pragma GCC unroll 16
      for (int r = 0; r < kTile; ++r) {
        Sum of_group[kVectors];
        for (int v = 0; v < kVectors; ++v)
          of_group[v] = load_as<Ints>(products + r * kPanel + v * kLanes);
        add_group(all[r], of_group, g, input_scales[r * inputs_.blocks() + g * group / kCodeBlock],
                  input_sums[r * sums_row + g]);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < kTile; ++r)
      for (int v = 0; v < kVectors; ++v) store(sums + r * kPanel + v * kLanes, all[r][v]);
  }

  std::optional<ByteTiles> tiles_;
#endif

  const Inputs& inputs_;
  float* sums_;
  CodePrefetcher ahead_;
  int64_t size_in_, begin_, end_;
  int group_ = kCodeBlock;
  alignas(64) GroupScales groups_;
  alignas(64) Weight weights_[kBlocksAtOnce * kCodeBlock * kPanel];
};

}  // namespace compiled_attn
