// Calls that were written down, made again.
#include "tape.h"

#include <utility>

#include "abi.h"

namespace compiled_attn {
namespace {

template <std::size_t>
using Word = int64_t;

// Words are passed in registers and on the stack as the calling conventions of x86-64 and AArch64
// have it for integers and pointers alike, so a function finds its own and ignores the rest.
template <std::size_t... at>
void call(const int64_t* words, std::index_sequence<at...>) {
  const auto function = reinterpret_cast<void (*)(Word<at>...)>(words[0]);
  function(words[1 + at]...);
}

}  // namespace
}  // namespace compiled_attn

using compiled_attn::Notes;

#define CA_EXPORT extern "C" __attribute__((visibility("default")))

CA_EXPORT void compiled_attn_note_calls(int32_t are_wanted) { Notes::mine().want(are_wanted); }

CA_EXPORT int64_t compiled_attn_noted(const int64_t** words, const int64_t** pointers,
                                      int64_t* pointer_count) {
  return Notes::mine().give(words, pointers, pointer_count);
}

CA_EXPORT int32_t compiled_attn_call(const int64_t* words) {
  compiled_attn::call(words, std::make_index_sequence<compiled_attn::kMostWords>());
  return 0;
}

CA_EXPORT int32_t compiled_attn_play(const int64_t* tape, int64_t words) {
  try {
    for (int64_t at = 0; at < words; at += tape[at]) {
      const auto entry = reinterpret_cast<compiled_attn::Entry>(tape[at + 1]);
      if (entry(tape + at + 2) != 0) return 1;
    }
  } catch (...) {  // of a generated kernel; whoever runs it the long way sees what it is
    return 1;
  }
  return 0;
}
