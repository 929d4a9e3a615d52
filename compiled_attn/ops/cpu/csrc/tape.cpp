// Calls that were written down, made again.
#include "tape.h"

#include <exception>
#include <string>
#include <utility>

#include "abi.h"

namespace compiled_attn {
namespace {

template <std::size_t>
using Word = int64_t;

// The calling conventions of x86-64 and AArch64 pass words, integers and pointers alike, in registers
// and then on the stack, so that a function that takes words finds its own and ignores the rest.
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

CA_EXPORT void compiled_attn_call(const int64_t* words) {
  compiled_attn::call(words, std::make_index_sequence<compiled_attn::kMostWords>());
}

CA_EXPORT const char* compiled_attn_play(const int64_t* tape, int64_t words) {
  static thread_local std::string why;
  try {
    for (int64_t at = 0; at < words; at += tape[at])
      reinterpret_cast<compiled_attn::Entry>(tape[at + 1])(tape + at + 2);
    return nullptr;
  } catch (const std::exception& error) {
    why = error.what();
  } catch (...) {
    why = "unhandled error";
  }
  return why.c_str();
}
