// Replays recorded calls.
#include "replay.h"

#include <exception>
#include <string>
#include <utility>

#include "abi.h"

namespace compiled_attn {
namespace {

template <std::size_t>
using Word = int64_t;

// The calling conventions of x86-64 and AArch64 pass integers and pointers in registers and then on
// the stack, so a function finds its own arguments and ignores the rest.
template <std::size_t... at>
void call(const int64_t* words, std::index_sequence<at...>) {
  const auto function = reinterpret_cast<void (*)(Word<at>...)>(words[0]);
  function(words[1 + at]...);
}

}  // namespace
}  // namespace compiled_attn

using compiled_attn::CallRecorder;

#define CA_EXPORT extern "C" __attribute__((visibility("default")))

CA_EXPORT void compiled_attn_record_calls(int32_t enabled) {
  CallRecorder::current().enable(enabled);
}

CA_EXPORT int64_t compiled_attn_recorded_call(const int64_t** words, const int64_t** pointers,
                                              int64_t* pointer_count) {
  return CallRecorder::current().take_last(words, pointers, pointer_count);
}

CA_EXPORT void compiled_attn_call(const int64_t* words) {
  compiled_attn::call(words, std::make_index_sequence<compiled_attn::kMaxWords>());
}

CA_EXPORT const char* compiled_attn_replay(const int64_t* calls, int64_t words) {
  static thread_local std::string why;
  try {
    for (int64_t at = 0; at < words; at += calls[at])
      reinterpret_cast<compiled_attn::Entry>(calls[at + 1])(calls + at + 2);
    return nullptr;
  } catch (const std::exception& error) {
    why = error.what();
  } catch (...) {
    why = "unhandled error";
  }
  return why.c_str();
}
