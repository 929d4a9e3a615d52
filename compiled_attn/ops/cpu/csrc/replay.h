// Records kernel calls as machine words, and replays them without the ops.
//
// The calls of a compiled graph depend only on the sizes of its inputs. Recorded once, they replay
// without the dispatcher, argument checks and Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

namespace compiled_attn {

// Makes a call from its words; throws what its op would.
using Entry = void (*)(const int64_t* words);

// Reads the next arguments.
template <class Args>
Args read_args(const int64_t*& words) {
  Args args;
  std::memcpy(&args, words, sizeof args);
  words += sizeof args / sizeof *words;
  return args;
}

// The last call made by this thread's ops.
class CallRecorder {
 public:
  // Returns null unless recording is on.
  static CallRecorder* active() { return current().enabled_ ? &current() : nullptr; }
  static CallRecorder& current() {
    static thread_local CallRecorder recorder;
    return recorder;
  }

  void enable(bool enabled) { enabled_ = enabled, taken_ = true; }

  // Starts a call; its words follow.
  void begin(Entry entry) {
    words_.clear(), pointers_.clear();
    taken_ = false;
    words_.push_back(reinterpret_cast<int64_t>(entry));
  }
  void put(int64_t word) { words_.push_back(word); }
  // Appends arguments; those at the byte offsets `addresses` are pointers.
  template <class Args, std::size_t count>
  void put(const Args& args, const std::size_t (&addresses)[count]) {
    static_assert(std::is_trivially_copyable_v<Args> && sizeof(Args) % sizeof(int64_t) == 0);
    const int64_t begin = int64_t(words_.size());
    words_.resize(words_.size() + sizeof(Args) / sizeof(int64_t));
    std::memcpy(words_.data() + begin, &args, sizeof(Args));
    for (const std::size_t at : addresses) {
      const int64_t index = begin + int64_t(at / sizeof(int64_t));
      if (words_[index]) pointers_.push_back(index);
    }
  }

  // Takes the last call: its words, beginning with the entry, and the positions of addresses. Valid
  // until the next one begins.
  int64_t take_last(const int64_t** words, const int64_t** pointers, int64_t* pointer_count) {
    if (taken_) return 0;
    *words = words_.data(), *pointers = pointers_.data(), *pointer_count = pointers_.size();
    taken_ = true;
    return int64_t(words_.size());
  }

 private:
  bool enabled_ = false, taken_ = true;
  std::vector<int64_t> words_, pointers_;
};

}  // namespace compiled_attn
