// Attention with a cache in int8 or fp8; may be a library of its own.
#include "attention/attend.h"

namespace compiled_attn {
namespace {

template <class Element>
bool attend_fp8(const Args& args, int threads, Write write) {
  using Prefill = PrefillKernel<Float32Units<Element>>;
#if CA_HAS_FP8_TABLES
  if (args.query_dtype == kBFloat16)
    return attend<DecodeKernel<Fp8Table<Element>>, Prefill>(args, threads, write);
#endif
  return attend<DecodeKernel<Float32Fma<Element>>, Prefill>(args, threads, write);
}

bool attend_int8(const Args& args, int threads, Write write) {
  using Prefill = PrefillKernel<Float32Units<int8_t>>;
#if CA_HAS_INT8_VNNI
  if (args.query_dtype == kBFloat16)
    return attend<DecodeKernel<Int8Vnni>, Prefill>(args, threads, write);
#elif CA_HAS_INT8_MADD
  if (args.query_dtype == kBFloat16)
    return attend<DecodeKernel<Int8Madd>, Prefill>(args, threads, write);
#endif
  return attend<DecodeKernel<Float32Fma<int8_t>>, Prefill>(args, threads, write);
}

}  // namespace
}  // namespace compiled_attn

extern "C" bool compiled_attn_attend_8bit(const compiled_attn::Args& args, int threads,
                                          compiled_attn::Write write) {
  using namespace compiled_attn;
  switch (args.cache_dtype) {
    case kFloat8E4M3:
      return attend_fp8<Float8E4M3>(args, threads, write);
    case kFloat8E5M2:
      return attend_fp8<Float8E5M2>(args, threads, write);
    default:
      return attend_int8(args, threads, write);
  }
}
