// What ops share: tensors that may be missing, and where data of one lies.
#pragma once

#include <optional>

#include "arguments.h"

namespace compiled_attn {

using Maybe = std::optional<Tensor>;

// Of this process, for all calls; set before any.
inline Forms forms;

template <typename T>
const T* data_of(const Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}

inline const float* floats_of(const Maybe& tensor) {
  return tensor ? data_of<float>(*tensor) : nullptr;
}

}  // namespace compiled_attn
