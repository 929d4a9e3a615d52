// Linear layers of packed weights on the CPU: the cut into pieces, and threads.
#include <omp.h>

#include <atomic>
#include <new>

#include "float_mode.h"
#include "linear_rows.h"
#include "linear_tiles.h"

namespace compiled_attn {
namespace {

using Args = PackedLinearArgs;

constexpr int64_t kRowsAtOnce = 256;  // their inputs stay in the second level cache
constexpr int64_t kPanelsAtOnce = 8;

// Pieces of rows x panels, those of the same rows one after the other.
class Pieces {
 public:
  explicit Pieces(const Args& args)
      : args_(args), columns_((panels() + kPanelsAtOnce - 1) / kPanelsAtOnce) {}

  int64_t count() const { return (args_.rows + kRowsAtOnce - 1) / kRowsAtOnce * columns_; }

  template <class Worker>
  void run(int64_t piece, Worker& worker) const {
    const int64_t row = piece / columns_ * kRowsAtOnce, panel = piece % columns_ * kPanelsAtOnce;
    worker.run(row, std::min(row + kRowsAtOnce, args_.rows), panel,
               std::min(kPanelsAtOnce, panels() - panel));
  }

 private:
  int64_t panels() const { return args_.size_out / kPanel; }

  const Args& args_;
  int64_t columns_;
};

void multiply(const Args& args) {
  const Pieces pieces(args);
  std::atomic<int64_t> next{0};
#if CA_HAS_TILES
  Scratch scratch;
  const InputTiles inputs(args, scratch);
#endif
#pragma omp parallel num_threads(int(std::clamp<int64_t>(pieces.count(), 1, args.threads)))
  {
    const FloatMode mode;
#if CA_HAS_TILES
#pragma omp for
    for (int64_t row = 0; row < args.rows; row += kTile) inputs.fill(row);
    LinearTiles worker(args, inputs);
#else
    const LinearRows worker(args);
#endif
    for (int64_t i = next++; i < pieces.count(); i = next++) pieces.run(i, worker);
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
