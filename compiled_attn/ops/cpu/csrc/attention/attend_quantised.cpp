// Attention with a cache in int8 or fp8.
#include "attention/attend.h"

namespace compiled_attn {
namespace {

template <class Element>
bool attend_fp8(const Args& args, int threads) {
  using Prefill = PrefillKernel<Float32Units<Element>>;
#if CA_HAS_FP8_TABLES
  if (args.query_dtype == kBFloat16)
    return attend<DecodeKernel<Fp8Table<Element>>, Prefill>(args, threads);
#endif
  return attend<DecodeKernel<Float32Fma<Element>>, Prefill>(args, threads);
}

bool attend_int8(const Args& args, int threads) {
  using Prefill = PrefillKernel<Float32Units<int8_t>>;
#if CA_HAS_INT8_VNNI
  if (args.query_dtype == kBFloat16) return attend<DecodeKernel<Int8Vnni>, Prefill>(args, threads);
#elif CA_HAS_INT8_MADD
  if (args.query_dtype == kBFloat16) return attend<DecodeKernel<Int8Madd>, Prefill>(args, threads);
#endif
  return attend<DecodeKernel<Float32Fma<int8_t>>, Prefill>(args, threads);
}

}  // namespace

bool attend_quantised(const Args& args, int threads) {
  switch (args.cache_dtype) {
    case kFloat8E4M3:
      return attend_fp8<Float8E4M3>(args, threads);
    case kFloat8E5M2:
      return attend_fp8<Float8E5M2>(args, threads);
    default:
      return attend_int8(args, threads);
  }
}

}  // namespace compiled_attn
