// Calls of the kernels as machine words: noted while ops run, played again without them.
//
// What a compiled graph calls hangs on the sizes of its inputs alone. So its calls can be written
// down once, and later be made one after the other: without the dispatcher, checks that held the
// first time, and Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

namespace compiled_attn {

// Makes a call from its words; throws what its op would.
using Entry = void (*)(const int64_t* words);

// The next arguments among words.
template <class Args>
Args taken(const int64_t*& words) {
  Args args;
  std::memcpy(&args, words, sizeof args);
  words += sizeof args / sizeof *words;
  return args;
}

// The calls that ops make in a thread.
class Notes {
 public:
  // What the ops of this thread note; null where nobody asked.
  static Notes* wanted() { return mine().is_wanted_ ? &mine() : nullptr; }
  static Notes& mine() {
    static thread_local Notes notes;
    return notes;
  }

  void want(bool is_wanted) { is_wanted_ = is_wanted, is_given_ = true; }

  // A call, whose words are to follow.
  void begin(Entry entry) {
    words_.clear(), pointers_.clear();
    is_given_ = false;
    words_.push_back(reinterpret_cast<int64_t>(entry));
  }
  void put(int64_t word) { words_.push_back(word); }
  // Arguments as their words, of which those at `addresses`, in bytes, are pointers.
  template <class Args, std::size_t count>
  void put(const Args& args, const std::size_t (&addresses)[count]) {
    static_assert(std::is_trivially_copyable_v<Args> && sizeof(Args) % sizeof(int64_t) == 0);
    const int64_t begin = int64_t(words_.size());
    words_.resize(words_.size() + sizeof(Args) / sizeof(int64_t));
    std::memcpy(words_.data() + begin, &args, sizeof(Args));
    for (const std::size_t at : addresses) {
      const int64_t place = begin + int64_t(at / sizeof(int64_t));
      if (words_[place]) pointers_.push_back(place);
    }
  }

  // The last call, once: its words, the entry first, and the places of addresses among them. They
  // hold until the next one begins.
  int64_t give(const int64_t** words, const int64_t** pointers, int64_t* pointer_count) {
    if (is_given_) return 0;
    *words = words_.data(), *pointers = pointers_.data(), *pointer_count = pointers_.size();
    is_given_ = true;
    return int64_t(words_.size());
  }

 private:
  bool is_wanted_ = false, is_given_ = true;
  std::vector<int64_t> words_, pointers_;
};

}  // namespace compiled_attn
