// Registers the ops through torch's stable ABI: no Python, no ATen.
#include <torch/csrc/stable/library.h>

#include "attention/attention_op.h"
#include "linear/linear_ops.h"
#include "linear/lora_op.h"
#include "linear/quantised_ops.h"
#include "sampling/sample_tokens_op.h"
#include "schema.h"
#include "state/state_ops.h"

#ifndef COMPILED_ATTN_NAMESPACE
#define COMPILED_ATTN_NAMESPACE compiled_attn
#endif

extern "C" __attribute__((visibility("default"))) void compiled_attn_set_tuning(
    const compiled_attn::KernelTuning* tuning) {
  compiled_attn::tuning = *tuning;
}

STABLE_TORCH_LIBRARY_FRAGMENT(COMPILED_ATTN_NAMESPACE, m) {
  m.def(compiled_attn::kPagedAttentionSchema);
  m.def(compiled_attn::kPagedAttentionWriteSchema);
  m.def(compiled_attn::kPackedLinearSchema);
  m.def(compiled_attn::kPackedLinearsSchema);
  m.def(compiled_attn::kPackedSwigluSchema);
  m.def(compiled_attn::kPackedRowsSchema);
  m.def(compiled_attn::kQuantisedLinearSchema);
  m.def(compiled_attn::kQuantisedLinearsSchema);
  m.def(compiled_attn::kQuantisedSwigluSchema);
  m.def(compiled_attn::kQuantisedRowsSchema);
  m.def(compiled_attn::kAddLoraSchema);
  m.def(compiled_attn::kSampleTokensSchema);
  m.def(compiled_attn::kStateConvSchema);
  m.def(compiled_attn::kStateDeltaSchema);
  m.def(compiled_attn::kStateSsdSchema);
  m.def(compiled_attn::kStateScanSchema);
}

STABLE_TORCH_LIBRARY_IMPL(COMPILED_ATTN_NAMESPACE, CPU, m) {
  m.impl("paged_attention", TORCH_BOX(&compiled_attn::paged_attention));
  m.impl("paged_attention_", TORCH_BOX(&compiled_attn::paged_attention_));
  m.impl("packed_linear", TORCH_BOX(&compiled_attn::packed_linear));
  m.impl("packed_linears", TORCH_BOX(&compiled_attn::packed_linears));
  m.impl("packed_swiglu", TORCH_BOX(&compiled_attn::packed_swiglu));
  m.impl("packed_rows", TORCH_BOX(&compiled_attn::packed_rows));
  m.impl("quantised_linear", TORCH_BOX(&compiled_attn::quantised_linear));
  m.impl("quantised_linears", TORCH_BOX(&compiled_attn::quantised_linears));
  m.impl("quantised_swiglu", TORCH_BOX(&compiled_attn::quantised_swiglu));
  m.impl("quantised_rows", TORCH_BOX(&compiled_attn::quantised_rows));
  m.impl("add_lora", TORCH_BOX(&compiled_attn::add_lora));
  m.impl("sample_tokens", TORCH_BOX(&compiled_attn::sample_tokens));
  m.impl("state_conv_", TORCH_BOX(&compiled_attn::state_conv_));
  m.impl("state_delta_", TORCH_BOX(&compiled_attn::state_delta_));
  m.impl("state_ssd_", TORCH_BOX(&compiled_attn::state_ssd_));
  m.impl("state_scan_", TORCH_BOX(&compiled_attn::state_scan_));
}
