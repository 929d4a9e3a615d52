// Linear layers of packed weights on the CPU: the cut into pieces, and threads.
#include <omp.h>

#include <algorithm>
#include <atomic>
#include <new>
#include <type_traits>
#include <vector>

#include "float_mode.h"
#include "linear_gate.h"
#include "linear_rows.h"
#include "linear_tiles.h"

namespace compiled_attn {
namespace {

constexpr int64_t kRowBytesAtOnce = 512;  // of a column: inputs stay in the second level cache

// Pieces of rows x panels of layers of one input, those of the same rows one after the other. Of a
// gate each is followed by the piece that it is a gate to: they are taken together.
template <class Worker>
class Pieces {
 public:
  Pieces(const PackedLinearArgs* layers, int64_t count, bool is_gated)
      : layers_(layers),
        together_(is_gated ? 2 : 1),
        rows_(layers->rows),
        size_(layers->dtype == kFloat32 ? sizeof(float) : sizeof(BFloat16)),
        rows_at_once_(kRowBytesAtOnce / int64_t(sizeof(typename Worker::Input))) {
    int64_t all = 0;
    for (int64_t i = 0; i < count; ++i) all += layers[i].size_out;
    outputs_ = kPanel * Worker::panels(*layers, all / (together_ * layers->threads * kPanel));
    for (int64_t i = 0; i < count; ++i) columns_ += columns(layers[i]);
  }

  int64_t together() const { return together_; }
  int64_t rows() const { return std::min(rows_at_once_, rows_); }  // of a piece, at most
  int64_t outputs() const { return outputs_; }
  int64_t count() const { return (rows_ + rows_at_once_ - 1) / rows_at_once_ * columns_; }
  int64_t begin(int64_t piece) const { return piece / columns_ * rows_at_once_; }
  int64_t end(int64_t piece) const { return std::min(begin(piece) + rows_at_once_, rows_); }

  // The outputs of a piece, as a layer.
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
  int64_t together_, rows_, size_, rows_at_once_, outputs_, columns_ = 0;  // size_: of an element
};

// Layers of the same input, dtype, rows and threads, all with scales, all of halves, or none.
template <class Worker>
void multiply(const PackedLinearArgs* layers, int64_t layer_count, bool is_gated) {
  const PackedLinearArgs& whole = *layers;
  const Pieces<Worker> pieces(layers, layer_count, is_gated);
  const int64_t count = pieces.count(), together = pieces.together();
  const int threads = int(std::clamp<int64_t>(count / together, 1, whole.threads));
  const int64_t room = whole.scale ? pieces.outputs() * whole.size_in : 0;
  std::atomic<int64_t> next{0};
  Scratch scratch;
  BFloat16* wide;  // of a piece and of the next, in turn
  scratch.take(wide, 2 * room * threads);
  Gated<typename Worker::Element> gated(pieces.rows(), pieces.outputs());
  gated.take(scratch, is_gated ? threads : 0);
  typename Worker::Inputs inputs(whole, scratch);
#pragma omp parallel num_threads(threads)
  {
    const FloatMode mode;
    const auto take = [&] { return next.fetch_add(together); };
    int64_t piece = take();  // before any thread takes its second
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
      if (!layer.out) gated.put_beside(omp_get_thread_num(), pieces.begin(piece), layer);
      NextWeights ahead;
      if (following < count) ahead = NextWeights(pieces.layer(following), own + !turn * room);
      worker.run(layer, pieces.begin(piece), pieces.end(piece), ahead);
      if (is_gated && !is_gate) {
        worker.finish();
        gated.multiply(pieces.layer(piece - 1), pieces.begin(piece), pieces.end(piece), layer);
      }
      ahead.take_rest();
      piece = following;
    }
  }
}

#if CA_HAS_TILES
// Some rows at a time, as their parts take half as much memory again as the input.
void multiply_split(const PackedLinearArgs* layers, int64_t count, bool is_gated) {
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
    multiply<LinearTiles<SplitInputs>>(some.data(), count, is_gated);
  }
}
#endif

void multiply(const PackedLinearArgs* layers, int64_t count, bool is_gated) {
  const auto with = [&](auto* worker) {
    multiply<std::remove_pointer_t<decltype(worker)>>(layers, count, is_gated);
  };
#if CA_HAS_TILES
  if (layers->products == kTiles) {
    if (layers->is_halves) return multiply_split(layers, count, is_gated);
    if (layers->dtype == kBFloat16) return with((LinearTiles<TileInputs>*)nullptr);
  }
#endif
  if (layers->is_halves) return with((LinearRows<FloatProducts<float>>*)nullptr);
  if (layers->dtype == kFloat32) return with((LinearRows<SingleProducts>*)nullptr);
#if CA_HAS_BFLOAT16_DOT
  if (layers->products <= kPairs) return with((LinearRows<PairProducts>*)nullptr);
#endif
  return with((LinearRows<FloatProducts<BFloat16>>*)nullptr);
}

}  // namespace
}  // namespace compiled_attn

extern "C" int32_t compiled_attn_packed_linear(const compiled_attn::PackedLinearArgs* layers,
                                               int64_t count, int32_t is_gated) {
  using namespace compiled_attn;
  try {
    multiply(layers, count, is_gated);
    return kOk;
  } catch (const std::bad_alloc&) {
    return kOutOfMemory;
  }
}
