// Linear layers with packed weights on the CPU: pieces and threads.
#include <omp.h>

#include <algorithm>
#include <atomic>
#include <new>
#include <type_traits>
#include <vector>

#include "linear/linear_amx.h"
#include "linear/linear_simd.h"
#include "vector/float_mode.h"

namespace compiled_attn {
namespace {

constexpr int64_t kRowBytesAtOnce = 512;  // of a row: inputs stay in L2

// Pieces of rows x panels of layers with one input, ordered by rows. SwiGLU pieces come in pairs,
// gate and up, that one thread takes together.
template <class Worker>
class Pieces {
 public:
  Pieces(const PackedLinearArgs* layers, int64_t count, bool is_swiglu)
      : layers_(layers),
        together_(is_swiglu ? 2 : 1),
        rows_(layers->rows),
        size_(layers->dtype == kFloat32 ? sizeof(float) : sizeof(BFloat16)),
        rows_at_once_(kRowBytesAtOnce / int64_t(sizeof(typename Worker::Input))) {
    int64_t all = 0;
    for (int64_t i = 0; i < count; ++i) all += layers[i].size_out;
    outputs_ = kPanel * Worker::panels(*layers, all / (together_ * layers->threads * kPanel));
    for (int64_t i = 0; i < count; ++i) columns_ += columns(layers[i]);
  }

  int64_t together() const { return together_; }
  int64_t rows() const { return std::min(rows_at_once_, rows_); }  // per piece, at most
  int64_t outputs() const { return outputs_; }
  int64_t count() const { return (rows_ + rows_at_once_ - 1) / rows_at_once_ * columns_; }
  int64_t begin(int64_t piece) const { return piece / columns_ * rows_at_once_; }
  int64_t end(int64_t piece) const { return std::min(begin(piece) + rows_at_once_, rows_); }

  // A piece's outputs as a layer.
  PackedLinearArgs layer(int64_t piece) const {
    int64_t column = piece % columns_ / together_;
    const PackedLinearArgs* of = layers_ + piece % together_;
    for (; column >= columns(*of); ++of) column -= columns(*of);
    const int64_t first = column * outputs_;
    PackedLinearArgs layer = *of;
    layer.size_out = std::min(outputs_, of->size_out - first);
    layer.weight = at(of->weight, first * of->size_in * weight_bytes(*of));
    if (of->scale) layer.scale += first;
    if (of->bias) layer.bias = at(of->bias, first * size_);
    if (of->out) layer.out = static_cast<uint8_t*>(of->out) + first * size_;
    return layer;
  }

 private:
  int64_t columns(const PackedLinearArgs& of) const {
    return (of.size_out + outputs_ - 1) / outputs_;
  }

  static const void* at(const void* base, int64_t bytes) {
    return static_cast<const uint8_t*>(base) + bytes;
  }

  const PackedLinearArgs* layers_;
  // size_: bytes per element
  int64_t together_, rows_, size_, rows_at_once_, outputs_, columns_ = 0;
};

// Layers must share input, dtype, rows, threads, and whether they have scales or bfloat16 weights.
template <class Worker>
void multiply(const PackedLinearArgs* layers, int64_t layer_count, bool is_swiglu) {
  const PackedLinearArgs& whole = *layers;
  const Pieces<Worker> pieces(layers, layer_count, is_swiglu);
  const int64_t count = pieces.count(), together = pieces.together();
  const int threads = int(std::clamp<int64_t>(count / together, 1, whole.threads));
  const int64_t room = whole.scale ? pieces.outputs() * whole.size_in : 0;
  std::atomic<int64_t> next{0};
  Scratch scratch;
  BFloat16* wide;  // of this piece and the next
  scratch.take(wide, 2 * room * threads);
  SwiGlu<typename Worker::Element> swiglu(pieces.rows(), pieces.outputs());
  swiglu.take(scratch, is_swiglu ? threads : 0);
  typename Worker::Inputs inputs(whole, scratch);
#pragma omp parallel num_threads(threads)
  {
    const FloatMode mode;
    const auto take = [&] { return next.fetch_add(together); };
    int64_t piece = take();  // before any thread takes a second
    BFloat16* const own = wide + 2 * room * omp_get_thread_num();
    Worker worker(inputs, whole.size_in);
    inputs.prepare(omp_get_thread_num(), omp_get_num_threads());
#pragma omp barrier
    if (piece < count) NextWeights(pieces.layer(piece), own).take_all();
    for (int64_t turn = 0; piece < count; turn = !turn) {
      const bool is_gate = piece % together + 1 < together;
      const int64_t following = is_gate ? piece + 1 : take();
      PackedLinearArgs layer = pieces.layer(piece);
      if (whole.scale) layer.weight = own + turn * room;
      if (!layer.out) swiglu.set_up_output(omp_get_thread_num(), pieces.begin(piece), layer);
      NextWeights ahead;
      if (following < count) ahead = NextWeights(pieces.layer(following), own + !turn * room);
      worker.run(layer, pieces.begin(piece), pieces.end(piece), ahead);
      if (is_swiglu && !is_gate) {
        worker.finish();
        swiglu.multiply(pieces.layer(piece - 1), pieces.begin(piece), pieces.end(piece), layer);
      }
      ahead.take_rest();
      piece = following;
    }
  }
}

#if CA_HAS_TILES
// Processes some rows at a time, since split inputs take 1.5 times the memory.
void multiply_split(const PackedLinearArgs* layers, int64_t count, bool is_swiglu) {
  constexpr int64_t kRows = 256;
  std::vector<PackedLinearArgs> some(layers, layers + count);
  const int64_t rows = layers->rows;
  for (int64_t row = 0; row < rows; row += kRows) {
    for (int64_t i = 0; i < count; ++i) {
      const PackedLinearArgs& whole = layers[i];
      some[i].rows = std::min(kRows, rows - row);
      some[i].input = static_cast<const float*>(whole.input) + row * whole.input_row;
      if (whole.out) some[i].out = static_cast<float*>(whole.out) + row * whole.out_row;
    }
    multiply<LinearAmx<SplitInputs>>(some.data(), count, is_swiglu);
  }
}
#endif

void multiply(const PackedLinearArgs* layers, int64_t count, bool is_swiglu) {
  const auto with = [&](auto* worker) {
    multiply<std::remove_pointer_t<decltype(worker)>>(layers, count, is_swiglu);
  };
#if CA_HAS_TILES
  if (layers->products == kAmxTiles) {
    if (layers->weight_is_bf16) return multiply_split(layers, count, is_swiglu);
    if (layers->dtype == kBFloat16) return with((LinearAmx<TileInputs>*)nullptr);
  }
#endif
  if (layers->weight_is_bf16) return with((LinearSimd<WidenProducts<float>>*)nullptr);
  if (layers->dtype == kFloat32) return with((LinearSimd<Float32Products>*)nullptr);
#if CA_HAS_BF16_DOT
  if (layers->products <= kBf16Dot) return with((LinearSimd<Bf16DotProducts>*)nullptr);
#endif
  return with((LinearSimd<WidenProducts<BFloat16>>*)nullptr);
}

}  // namespace
}  // namespace compiled_attn

extern "C" int32_t compiled_attn_packed_linear(const compiled_attn::PackedLinearArgs* layers,
                                               int64_t count, int32_t is_swiglu) {
  using namespace compiled_attn;
  try {
    multiply(layers, count, is_swiglu);
    return kOk;
  } catch (const std::bad_alloc&) {
    return kOutOfMemory;
  }
}
