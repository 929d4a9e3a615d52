// Scratch memory of one call.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>
#include <vector>

namespace compiled_attn {

class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() {
    for (void* block : blocks_) std::free(block);
  }

  // Allocates n elements, aligned to a cache line; throws std::bad_alloc.
  template <class T>
  void take(T*& to, int64_t n) {
    const std::size_t bytes = (std::size_t(n) * sizeof(T) + 127) / 64 * 64;
    blocks_.reserve(blocks_.size() + 1);
    void* block = std::aligned_alloc(64, bytes);
    if (!block) throw std::bad_alloc();
    blocks_.push_back(block);
    to = static_cast<T*>(block);
  }

 private:
  std::vector<void*> blocks_;
};

template <int multiple>
constexpr int64_t padded(int64_t n) {
  return (n + multiple - 1) / multiple * multiple;
}

}  // namespace compiled_attn
