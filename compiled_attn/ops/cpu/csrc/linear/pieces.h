// Divides linear layers into pieces of rows and panels, for threads and caches.
#pragma once

#include <algorithm>

#include "linear/epilogue.h"

namespace compiled_attn {

constexpr int64_t kRowBytesAtOnce = 512;  // of a row: inputs stay in L2

constexpr int kCodeBlock = 32;  // inputs of a block of a quantised weight

// Advances a weight by some panels.
inline void skip_panels(QuantisedWeight& weight, int64_t panels, int64_t size_in) {
  const int64_t both = weight.kind == kScaleMinimum || weight.kind == kSuperBoth ? 2 : 1;
  const int64_t bytes = weight.scales_are_float32 ? 4 : 2;
  weight.codes += panels * (size_in / kCodeBlock) * 64 * weight.bits;
  weight.scales = static_cast<const uint8_t*>(weight.scales) +
                  panels * weight.scale_groups * both * kPanel * bytes;
  if (weight.steps)
    weight.steps += panels * weight.step_groups * (weight.kind == kSuperBoth ? 2 : 1) * kPanel;
}

// Pieces of rows x panels of layers with one input, ordered by rows. SwiGLU pieces come in pairs,
// gate and up, that one thread takes together.
template <class Worker>
class Pieces {
 public:
  // weight_bytes: of an element of the weight, if it is not quantised
  Pieces(const PackedLinearArgs* layers, int64_t count, bool is_swiglu, int64_t weight_bytes = 0)
      : layers_(layers),
        weight_bytes_(weight_bytes),
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
    if (of->weight) layer.weight = at(of->weight, first * of->size_in * weight_bytes_);
    if (of->quantised.codes) skip_panels(layer.quantised, first / kPanel, of->size_in);
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
  int64_t weight_bytes_;
  // size_: bytes per element
  int64_t together_, rows_, size_, rows_at_once_, outputs_, columns_ = 0;
};

}  // namespace compiled_attn
