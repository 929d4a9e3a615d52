// Attention with a cache in bfloat16 or float16; may be a library of its own.
#include "attention/attend.h"

namespace compiled_attn {
namespace {

template <class Decode>
bool attend_with(const Args& args, int threads, Write write) {
#if CA_HAS_TILES
  if (args.tuning.prefill == kAmxTiles)
    return attend<Decode, PrefillKernelAmx>(args, threads, write);
#endif
#if CA_HAS_BF16_DOT
  if (args.tuning.prefill <= kBf16Dot)
    return attend<Decode, PrefillKernel<Bf16Units>>(args, threads, write);
#endif
  return attend<Decode, PrefillKernel<Float32Units<BFloat16>>>(args, threads, write);
}

bool attend_bfloat16(const Args& args, int threads, Write write) {
#if CA_HAS_BF16_DOT
  if (args.tuning.decode <= kBf16Dot)
    return attend_with<DecodeKernel<Bf16Dot>>(args, threads, write);
#endif
  return attend_with<DecodeKernel<Bf16Widen>>(args, threads, write);
}

}  // namespace
}  // namespace compiled_attn

extern "C" bool compiled_attn_attend_16bit(const compiled_attn::Args& args, int threads,
                                           compiled_attn::Write write) {
  using namespace compiled_attn;
  if (args.cache_dtype == kBFloat16) return attend_bfloat16(args, threads, write);
  return attend<DecodeKernel<Float32Fma<Float16>>, PrefillKernel<Float32Units<Float16>>>(
      args, threads, write);
}
