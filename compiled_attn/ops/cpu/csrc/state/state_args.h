// Arguments of the four state ops, which share one struct.
#pragma once

#include <cstddef>
#include <cstdint>

namespace compiled_attn {

enum StateKind : int64_t { kConvState, kDeltaState, kSsdState, kScanState };

// Elements [token, head, i] of a float dtype; the innermost stride is 1. Null: none.
struct StateInput {
  const void* data;
  int64_t token, head;  // strides; 0: the same for all
  int64_t dtype;
};

struct StateArgs {
  // conv: x, weight, bias. delta: q, k, v, g, beta. ssd, scan: x, dt, A, B, C, D.
  StateInput in[6];
  // [slots, heads, rows, columns]. conv: [slots, 1, C, K - 1] in the dtype of x; others float32:
  // delta [slots, Hv, Dk, Dv], ssd [slots, H, P, N], scan [slots, 1, C, N].
  void* state;
  void* out;  // [tokens, out_row], dense
  const int32_t* slots;            // [requests]; 0: neither read nor written
  const int32_t* seq_lens;         // [requests]; 0: padding
  const int32_t* query_start_loc;  // [requests + 1]
  int64_t tokens, requests, num_slots;
  int64_t heads, groups, rows, columns;  // groups: heads of q and k, or groups of B and C
  int64_t out_row, out_dtype;
  int64_t kind;
  int64_t silu, l2norm, decays_by_channel;  // the latter: g is [T, Hv, Dk]
  double scale;                             // of q
  int64_t threads;
};

// Byte offsets of all addresses: a replayed call may have other ones.
constexpr std::size_t kStateAddresses[] = {
    offsetof(StateArgs, in[0].data),      offsetof(StateArgs, in[1].data),
    offsetof(StateArgs, in[2].data),      offsetof(StateArgs, in[3].data),
    offsetof(StateArgs, in[4].data),      offsetof(StateArgs, in[5].data),
    offsetof(StateArgs, state),           offsetof(StateArgs, out),
    offsetof(StateArgs, slots),           offsetof(StateArgs, seq_lens),
    offsetof(StateArgs, query_start_loc),
};

// Fails when a field is added: if it is an address, add it to the list.
static_assert(sizeof(StateArgs) == 352, "check kStateAddresses");

}  // namespace compiled_attn

// Returns kOk, kBadOffsets, kBadLength, kBadSlot or kOutOfMemory; `error` has the numbers of Status.
extern "C" int32_t compiled_attn_state(const compiled_attn::StateArgs* args, int64_t error[4]);
