// Torch's matrix products as replayable calls, for layers whose weights are not packed. Calls
// torch's C shims, as AOTInductor does, without the dispatcher.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/inductor/aoti_torch/c/shim_cpu.h>
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include <cstring>
#include <optional>
#include <utility>

#include "arguments.h"
#include "replay.h"

#ifndef AT_MKLDNN_ENABLED
#define AT_MKLDNN_ENABLED() 0
#endif

namespace compiled_attn {
namespace {

// A tensor [rows, columns]; null data: none.
struct Matrix {
  void* data;
  int64_t rows, columns, row_stride, column_stride, dtype;
};

// out = left x right + bias
struct Product {
  Matrix out, left, right, bias;
};

void check(AOTITorchError status) {
  if (status == AOTI_TORCH_SUCCESS) return;
  fail("a product of torch", "an error", "run the graph without replay to see it");
}

int32_t dtype_of_torch(int64_t code) {
  switch (code) {
    case kBFloat16:
      return aoti_torch_dtype_bfloat16();
    case kFloat16:
      return aoti_torch_dtype_float16();
    case kFloat32:
      return aoti_torch_dtype_float32();
    default:
      fail("a dtype of products", text("code ", code), "report this");
  }
}

// dims 1: the first row; 3: a batch of one
Tensor tensor_of(const Matrix& matrix, int dims = 2) {
  const int64_t sizes[] = {1, matrix.rows, matrix.columns};
  const int64_t strides[] = {0, matrix.row_stride, matrix.column_stride};
  AtenTensorHandle tensor;
  check(aoti_torch_create_tensor_from_blob(matrix.data, dims, sizes + 3 - dims, strides + 3 - dims,
                                           0, dtype_of_torch(matrix.dtype),
                                           aoti_torch_device_type_cpu(), 0, &tensor));
  return Tensor(tensor);
}

void multiply(const Product& product) {
  const Tensor out = tensor_of(product.out);
  const Tensor left = tensor_of(product.left), right = tensor_of(product.right);
  if (!product.bias.data) return check(aoti_torch_cpu_mm_out(out.get(), left.get(), right.get()));
  const Tensor bias = tensor_of(product.bias);
  check(aoti_torch_cpu_addmm_out(out.get(), bias.get(), left.get(), right.get(), 1, 1));
}

void multiply_batch(const Product& product) {
  const Tensor left = tensor_of(product.left, 3), right = tensor_of(product.right, 3);
  check(aoti_torch_cpu_bmm_out(tensor_of(product.out, 3).get(), left.get(), right.get()));
}

// By oneDNN, which allocates its output, so it is copied; `right` is the transposed weight.
void multiply_by_onednn(const Product& product) {
#if AT_MKLDNN_ENABLED()
  Matrix weight = product.right;
  std::swap(weight.rows, weight.columns), std::swap(weight.row_stride, weight.column_stride);
  const Tensor left = tensor_of(product.left), right = tensor_of(weight);
  std::optional<Tensor> bias;
  if (product.bias.data) bias = tensor_of(product.bias, 1);
  AtenTensorHandle of_bias = bias ? bias->get() : nullptr, made;
  check(aoti_torch_cpu__linear_pointwise(left.get(), right.get(), bias ? &of_bias : nullptr, "none",
                                         nullptr, 0, nullptr, &made));
  const Tensor out(made);
  std::memcpy(product.out.data, out.const_data_ptr(), out.numel() * out.element_size());
#else
  fail("a torch with oneDNN", "one without", "run the graph without replay");
#endif
}

}  // namespace
}  // namespace compiled_attn

#define CA_EXPORT extern "C" __attribute__((visibility("default")))

// Replay entries; their words are a Product.
CA_EXPORT void compiled_attn_matmul(const int64_t* words) {
  using namespace compiled_attn;
  in_op("a matrix product", [&] { multiply(read_args<Product>(words)); });
}

CA_EXPORT void compiled_attn_bmm(const int64_t* words) {
  using namespace compiled_attn;
  in_op("a matrix product", [&] { multiply_batch(read_args<Product>(words)); });
}

CA_EXPORT void compiled_attn_onednn_matmul(const int64_t* words) {
  using namespace compiled_attn;
  in_op("a matrix product", [&] { multiply_by_onednn(read_args<Product>(words)); });
}
