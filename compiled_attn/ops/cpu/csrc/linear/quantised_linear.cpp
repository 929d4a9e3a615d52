// Linear layers with quantised weights on the CPU: pieces and threads.
#include <omp.h>

#include <atomic>
#include <new>

#include "linear/linear_amx.h"
#include "linear/quantised_simd.h"
#include "vector/float_mode.h"

namespace compiled_attn {
namespace {

#if CA_HAS_TILES
// Exact inputs in tiles, over weights that are rounded to bfloat16 piece by piece.
class QuantisedAmx {
 public:
  using Input = BFloat16;
  using Inputs = TileInputs;

  static int64_t panels(const PackedLinearArgs&, int64_t of_thread) {
    return NextWeights::panels(of_thread);
  }
  QuantisedAmx(const Inputs& inputs, BFloat16* wide, int64_t size_in)
      : wide_(wide), worker_(inputs, size_in) {}

  void run(const PackedLinearArgs& layer, int64_t begin, int64_t end, const PackedLinearArgs*) {
    widen_panels(layer.quantised, layer.size_out / kPanel, layer.size_in, wide_);
    PackedLinearArgs widened = layer;
    widened.weight = wide_, widened.quantised.codes = nullptr;
    NextWeights none;
    worker_.run(widened, begin, end, none);
    worker_.finish();
  }

 private:
  BFloat16* wide_;
  LinearAmx<TileInputs> worker_;
};
#endif

// make(inputs, scratch of the thread): a worker
template <class Worker, class Element, class Room, class Make>
void multiply(const PackedLinearArgs* layers, int64_t layer_count, bool is_swiglu, Room room_of,
              const Make& make) {
  const PackedLinearArgs& whole = *layers;
  const Pieces<Worker> pieces(layers, layer_count, is_swiglu);
  const int64_t count = pieces.count(), together = pieces.together();
  const int threads = int(std::clamp<int64_t>(count / together, 1, whole.threads));
  const int64_t room = room_of(pieces.rows(), pieces.outputs());
  std::atomic<int64_t> next{0};
  Scratch scratch;
  float* own;
  scratch.take(own, room * threads);
  SwiGlu<Element> swiglu(pieces.rows(), pieces.outputs());
  swiglu.take(scratch, is_swiglu ? threads : 0);
  typename Worker::Inputs inputs(whole, scratch);
#pragma omp parallel num_threads(threads)
  {
    const FloatMode mode;
    const int thread = omp_get_thread_num();
    const auto take = [&] { return next.fetch_add(together); };
    int64_t piece = take();  // before any thread takes a second
    auto worker = make(inputs, own + room * thread);
    if (piece < count) CodePrefetcher(pieces.layer(piece), 1).prefetch();
    inputs.prepare(thread, omp_get_num_threads());
#pragma omp barrier
    while (piece < count) {
      const bool is_gate = piece % together + 1 < together;
      const int64_t following = is_gate ? piece + 1 : take();
      PackedLinearArgs layer = pieces.layer(piece), ahead;
      if (!layer.out) swiglu.set_up_output(thread, pieces.begin(piece), layer);
      if (following < count) ahead = pieces.layer(following);
      worker.run(layer, pieces.begin(piece), pieces.end(piece), following < count ? &ahead : nullptr);
      if (is_swiglu && !is_gate)
        swiglu.multiply(pieces.layer(piece - 1), pieces.begin(piece), pieces.end(piece), layer);
      piece = following;
    }
  }
}

template <class Products>
void multiply_simd(const PackedLinearArgs* layers, int64_t count, bool is_swiglu) {
  using Worker = QuantisedSimd<Products>;
  const auto room = [](int64_t rows, int64_t) { return Worker::room(rows); };
  const auto make = [](const auto& inputs, float* sums) { return Worker(inputs, sums); };
  if (layers->dtype == kFloat32)
    return multiply<Worker, float>(layers, count, is_swiglu, room, make);
  multiply<Worker, BFloat16>(layers, count, is_swiglu, room, make);
}

void multiply(const PackedLinearArgs* layers, int64_t count, bool is_swiglu) {
  if (layers->quantised.int8_inputs) return multiply_simd<Int8Products>(layers, count, is_swiglu);
  if (layers->dtype == kBFloat16) {
#if CA_HAS_TILES
    if (layers->products == kAmxTiles)
      return multiply<QuantisedAmx, BFloat16>(
          layers, count, is_swiglu,
          [&](int64_t, int64_t outputs) { return outputs * layers->size_in / 2; },
          [&](const TileInputs& inputs, float* wide) {
            return QuantisedAmx(inputs, reinterpret_cast<BFloat16*>(wide), layers->size_in);
          });
#endif
#if CA_HAS_BF16_DOT
    if (layers->products <= kBf16Dot)
      return multiply_simd<CodeProducts<Bf16DotProducts>>(layers, count, is_swiglu);
#endif
  }
  multiply_simd<CodeProducts<WidenProducts<float>>>(layers, count, is_swiglu);
}

}  // namespace
}  // namespace compiled_attn

extern "C" int32_t compiled_attn_quantised_linear(const compiled_attn::PackedLinearArgs* layers,
                                                  int64_t count, int32_t is_swiglu) {
  using namespace compiled_attn;
  try {
    multiply(layers, count, is_swiglu);
    return kOk;
  } catch (const std::bad_alloc&) {
    return kOutOfMemory;
  }
}

extern "C" void compiled_attn_quantised_rows(const compiled_attn::QuantisedRowsArgs* args) {
  using namespace compiled_attn;
  const FloatMode mode;
  for (int64_t i = 0; i < args->count; ++i)
    if (args->as_bfloat16)
      copy_row(args->weight, args->size_in, args->ids[i],
               static_cast<BFloat16*>(args->out) + i * args->size_in);
    else
      copy_row(args->weight, args->size_in, args->ids[i],
               static_cast<float*>(args->out) + i * args->size_in);
}
