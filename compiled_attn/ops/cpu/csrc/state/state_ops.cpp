// The state ops on the CPU: requests of a step, padding, kernels.
#include "state/conv.h"
#include "state/delta.h"
#include "state/scan.h"

namespace compiled_attn {
namespace {

int32_t failed(int64_t error[4], Status status, int64_t a, int64_t b, int64_t c = 0) {
  error[0] = a, error[1] = b, error[2] = c;
  return status;
}

// Checks all indices before they are followed; collects requests with tokens.
int32_t check(const StateArgs& args, std::vector<StateRequest>& requests, int64_t error[4]) {
  for (int64_t r = 0; r < args.requests; ++r) {
    const int64_t begin = args.query_start_loc[r], end = args.query_start_loc[r + 1];
    const int64_t length = args.seq_lens[r], slot = args.slots[r];
    if (begin < 0 || end < begin || end > args.tokens)
      return failed(error, kBadOffsets, r, begin, end);
    if (length < 0 || (length && length < end - begin))
      return failed(error, kBadLength, r, length, end - begin);
    if (slot < 0 || slot >= args.num_slots) return failed(error, kBadSlot, r, slot);
    if (length && begin < end)
      requests.push_back({begin, end, slot, slot && length > end - begin});
  }
  return kOk;
}

void clear_padding(const StateArgs& args, const std::vector<StateRequest>& requests) {
  const int64_t row = args.out_row * (args.out_dtype == kFloat32 ? 4 : 2);
  const auto clear = [&](int64_t begin, int64_t end) {
    if (begin < end) std::memset(static_cast<char*>(args.out) + begin * row, 0, (end - begin) * row);
  };
  int64_t at = 0;
  for (const StateRequest& request : requests) clear(at, request.begin), at = request.end;
  clear(at, args.tokens);
}

void run(const StateArgs& args, const std::vector<StateRequest>& requests) {
  clear_padding(args, requests);
  switch (args.kind) {
    case kConvState:
      return by_float(args.out_dtype, [&](auto* type) {
        for_items<ConvChannels<std::remove_pointer_t<decltype(type)>>>(args, requests);
      });
    case kDeltaState:
      return for_items<DeltaColumns>(args, requests);
    case kSsdState:
      return for_items<ScanRows<false>>(args, requests);
    default:
      return for_items<ScanRows<true>>(args, requests);
  }
}

}  // namespace
}  // namespace compiled_attn

extern "C" int32_t compiled_attn_state(const compiled_attn::StateArgs* args, int64_t error[4]) {
  using namespace compiled_attn;
  try {
    std::vector<StateRequest> requests;
    requests.reserve(args->requests);
    if (const int32_t status = check(*args, requests, error)) return status;
    run(*args, requests);
    return kOk;
  } catch (const std::bad_alloc&) {
    return kOutOfMemory;
  }
}
