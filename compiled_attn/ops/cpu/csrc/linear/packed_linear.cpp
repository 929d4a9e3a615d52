// Linear layers with packed weights on the CPU: pieces and threads.
#include <omp.h>

#include <algorithm>
#include <atomic>
#include <new>
#include <type_traits>
#include <vector>

#include "linear/linear_amx.h"
#include "linear/linear_simd.h"
#include "linear/pieces.h"
#include "vector/float_mode.h"

namespace compiled_attn {
namespace {

// Layers must share input, dtype, rows, threads, and whether they have bfloat16 weights.
template <class Worker>
void multiply(const PackedLinearArgs* layers, int64_t layer_count, bool is_swiglu) {
  const PackedLinearArgs& whole = *layers;
  const Pieces<Worker> pieces(layers, layer_count, is_swiglu, weight_bytes(whole));
  const int64_t count = pieces.count(), together = pieces.together();
  const int threads = int(std::clamp<int64_t>(count / together, 1, whole.threads));
  std::atomic<int64_t> next{0};
  Scratch scratch;
  SwiGlu<typename Worker::Element> swiglu(pieces.rows(), pieces.outputs());
  swiglu.take(scratch, is_swiglu ? threads : 0);
  typename Worker::Inputs inputs(whole, scratch);
#pragma omp parallel num_threads(threads)
  {
    const FloatMode mode;
    const auto take = [&] { return next.fetch_add(together); };
    int64_t piece = take();  // before any thread takes a second
    Worker worker(inputs, whole.size_in);
    inputs.prepare(omp_get_thread_num(), omp_get_num_threads());
#pragma omp barrier
    if (piece < count) NextWeights(pieces.layer(piece)).take_all();
    while (piece < count) {
      const bool is_gate = piece % together + 1 < together;
      const int64_t following = is_gate ? piece + 1 : take();
      PackedLinearArgs layer = pieces.layer(piece);
      if (!layer.out) swiglu.set_up_output(omp_get_thread_num(), pieces.begin(piece), layer);
      NextWeights ahead;
      if (following < count) ahead = NextWeights(pieces.layer(following));
      worker.run(layer, pieces.begin(piece), pieces.end(piece), ahead);
      if (is_swiglu && !is_gate) {
        worker.finish();
        swiglu.multiply(pieces.layer(piece - 1), pieces.begin(piece), pieces.end(piece), layer);
      }
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
