// Linear layers of packed weights on the CPU: the cut into pieces, and threads.
#include <omp.h>

#include <atomic>
#include <new>

#include "float_mode.h"
#include "linear_rows.h"
#include "linear_tiles.h"

namespace compiled_attn {
namespace {

constexpr int64_t kRowsAtOnce = 256;  // their inputs stay in the second level cache

// Pieces of rows x panels of a layer, those of the same rows one after the other.
class Pieces {
 public:
  explicit Pieces(const PackedLinearArgs& whole)
      : whole_(whole),
        outputs_(kPanel * (whole.size_out < whole.threads * 8 * kPanel ? 4 : 8)),
        columns_((whole.size_out + outputs_ - 1) / outputs_) {}

  int64_t outputs() const { return outputs_; }  // of a piece, at most
  int64_t count() const { return (whole_.rows + kRowsAtOnce - 1) / kRowsAtOnce * columns_; }
  int64_t begin(int64_t piece) const { return piece / columns_ * kRowsAtOnce; }
  int64_t end(int64_t piece) const { return std::min(begin(piece) + kRowsAtOnce, whole_.rows); }

  // The outputs of a piece, as a layer.
  PackedLinearArgs layer(int64_t piece) const {
    const int64_t first = piece % columns_ * outputs_;
    const int64_t bytes = whole_.scale ? 1 : sizeof(BFloat16);
    const Finish finish = finish_of(whole_).from(first);
    PackedLinearArgs layer = whole_;
    layer.size_out = std::min(outputs_, whole_.size_out - first);
    layer.weight = static_cast<const uint8_t*>(whole_.weight) + first * whole_.size_in * bytes;
    layer.scale = finish.scale, layer.bias = finish.bias;
    layer.out = static_cast<BFloat16*>(whole_.out) + first;
    return layer;
  }

 private:
  const PackedLinearArgs& whole_;
  int64_t outputs_, columns_;
};

void multiply(const PackedLinearArgs& whole) {
  const Pieces pieces(whole);
  const int64_t count = pieces.count();
  const int threads = int(std::clamp<int64_t>(count, 1, whole.threads));
  const int64_t room = whole.scale ? pieces.outputs() * whole.size_in : 0;
  std::atomic<int64_t> next{0};
  Scratch scratch;
  BFloat16* wide;  // of a piece and of the next, in turn
  scratch.take(wide, 2 * room * threads);
#if CA_HAS_TILES
  const Inputs inputs(whole, scratch);
#endif
#pragma omp parallel num_threads(threads)
  {
    const FloatMode mode;
    int64_t piece = next++;  // before any thread takes its second
    BFloat16* const own = wide + 2 * room * omp_get_thread_num();
#if CA_HAS_TILES
    LinearTiles worker(inputs, whole.size_in);
#else
    LinearRows worker;
#endif
#pragma omp barrier
    if (piece < count) NextWeights(pieces.layer(piece), own).take_all();
    for (int64_t turn = 0; piece < count; turn = !turn) {
      const int64_t following = next++;
      PackedLinearArgs layer = pieces.layer(piece);
      if (whole.scale) layer.weight = own + turn * room;
      NextWeights ahead;
      if (following < count) ahead = {pieces.layer(following), own + !turn * room};
      worker.run(layer, pieces.begin(piece), pieces.end(piece), ahead);
      ahead.take_rest();
      piece = following;
    }
  }
}

}  // namespace
}  // namespace compiled_attn

extern "C" int32_t compiled_attn_packed_linear(const compiled_attn::PackedLinearArgs* args) {
  using namespace compiled_attn;
  try {
    multiply(*args);
    return kOk;
  } catch (const std::bad_alloc&) {
    return kOutOfMemory;
  }
}
