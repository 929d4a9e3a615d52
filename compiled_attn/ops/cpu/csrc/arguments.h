// Argument checks, with errors that state what was expected, what came, and a remedy.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

#include "abi.h"

namespace compiled_attn {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kAny = -1;

template <typename... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

struct ArgumentError : std::runtime_error {
  using runtime_error::runtime_error;
};

[[noreturn]] inline void fail(const std::string& expected, const std::string& got,
                              const char* remedy) {
  throw ArgumentError(text("expected ", expected, ", got ", got, ": ", remedy));
}

// Prefixes argument errors with the name of the op.
template <typename Body>
auto in_op(const char* name, const Body& body) {
  try {
    return body();
  } catch (const ArgumentError& error) {
    throw std::runtime_error(text(name, ": ", error.what()));
  }
}

template <typename Sizes>
std::string list(const Sizes& sizes) {
  std::string all = "[";
  for (int64_t size : sizes) {
    all +=
        (all.size() > 1 ? ", " : "") + (size == kAny ? std::string("any") : std::to_string(size));
  }
  return all + "]";
}

inline void check_shape(const char* name, const Tensor& tensor,
                        std::initializer_list<int64_t> shape) {
  auto sizes = tensor.sizes();
  bool fits = sizes.size() == shape.size();
  for (size_t axis = 0; fits && axis < shape.size(); ++axis) {
    int64_t size = shape.begin()[axis];
    fits = size == kAny || size == sizes[axis];
  }
  if (!fits) fail(text(name, ": ", list(shape)), list(sizes), "match the other arguments");
  if (!tensor.is_cpu()) fail(text(name, " on the CPU"), "another device", "move it with .cpu()");
}

inline void check_dtype(const char* name, const Tensor& tensor, ScalarType dtype) {
  if (tensor.scalar_type() != dtype) {
    fail(text(name, ": ", torch::headeronly::toString(dtype)),
         torch::headeronly::toString(tensor.scalar_type()), "convert it with .to()");
  }
}

// The last axis must be dense.
inline void check_rows(const char* name, const Tensor& tensor) {
  int64_t last = tensor.dim() - 1;
  if (tensor.size(last) > 1 && tensor.numel() && tensor.stride(last) != 1) {
    fail(text(name, ": last stride 1"), list(tensor.strides()), "call .contiguous()");
  }
}

// The address range of a tensor's elements.
inline std::pair<const char*, const char*> extent(const Tensor& tensor) {
  auto sizes = tensor.sizes(), strides = tensor.strides();
  int64_t last = 0;
  for (size_t axis = 0; axis < sizes.size(); ++axis) {
    if (sizes[axis] == 0) return {nullptr, nullptr};
    last += (sizes[axis] - 1) * strides[axis];
  }
  const char* data = static_cast<const char*>(tensor.const_data_ptr());
  return {data, data + (last + 1) * int64_t(tensor.element_size())};
}

// The memory of an argument; empty for None.
struct Memory {
  Memory(const char* name, const Tensor& tensor) : name(name), addresses(extent(tensor)) {}
  Memory(const char* name, const std::optional<Tensor>& tensor)
      : name(name), addresses(tensor ? extent(*tensor) : decltype(addresses){}) {}

  const char* name;
  std::pair<const char*, const char*> addresses;
};

// Outputs must not overlap inputs: an index overwritten after its check could point anywhere.
inline void check_apart(std::initializer_list<Memory> reads, std::initializer_list<Memory> writes) {
  for (const Memory& write : writes) {
    for (const Memory& read : reads) {
      if (read.addresses.first < write.addresses.second &&
          write.addresses.first < read.addresses.second) {
        fail(text(read.name, " apart from ", write.name), "shared memory", "call .clone()");
      }
    }
  }
}

// Every element that is written needs its own memory.
inline void check_written(const char* name, const Tensor& tensor) {
  for (int64_t axis = 0; axis < tensor.dim(); ++axis) {
    if (tensor.size(axis) > 1 && tensor.stride(axis) == 0) {
      fail(text(name, " with memory for each element"), "an expanded tensor", "call .clone()");
    }
  }
}

// Checks for a contiguous tensor of this shape and dtype.
inline void check_dense(const char* name, const Tensor& tensor,
                        std::initializer_list<int64_t> shape, ScalarType dtype) {
  check_shape(name, tensor, shape);
  check_dtype(name, tensor, dtype);
  if (!tensor.is_contiguous()) {
    fail(text(name, ": dense"), text("strides ", list(tensor.strides())), "call .contiguous()");
  }
}

inline std::optional<int32_t> dtype_code(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float:
      return kFloat32;
    case ScalarType::BFloat16:
      return kBFloat16;
    case ScalarType::Half:
      return kFloat16;
    case ScalarType::Char:
      return kInt8;
    case ScalarType::Float8_e4m3fn:
      return kFloat8E4M3;
    case ScalarType::Float8_e5m2:
      return kFloat8E5M2;
    default:
      return std::nullopt;
  }
}

inline bool is_quantised(int32_t code) { return code >= kInt8; }

using OptionalTensor = std::optional<Tensor>;

// Process-wide, set once before the first call.
inline KernelTuning tuning;

template <typename T>
const T* data_of(const Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}

inline const float* floats_of(const OptionalTensor& tensor) {
  return tensor ? data_of<float>(*tensor) : nullptr;
}

}  // namespace compiled_attn
