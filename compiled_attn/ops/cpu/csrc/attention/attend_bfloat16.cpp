// Attention with a cache in bfloat16.
#include "attention/attend.h"

namespace compiled_attn {
namespace {

template <class Decode>
bool attend_with(const Args& args, int threads, Write write) {
#if CA_HAS_TILES
  if (args.tuning.prefill == kAmxTiles) return attend<Decode, PrefillKernelAmx>(args, threads, write);
#endif
#if CA_HAS_BF16_DOT
  if (args.tuning.prefill <= kBf16Dot)
    return attend<Decode, PrefillKernel<Bf16Units>>(args, threads, write);
#endif
  return attend<Decode, PrefillKernel<Float32Units<BFloat16>>>(args, threads, write);
}

}  // namespace

bool attend_bfloat16(const Args& args, int threads, Write write) {
#if CA_HAS_BF16_DOT
  if (args.tuning.decode <= kBf16Dot) return attend_with<DecodeKernel<Bf16Dot>>(args, threads, write);
#endif
  return attend_with<DecodeKernel<Bf16Widen>>(args, threads, write);
}

}  // namespace compiled_attn
