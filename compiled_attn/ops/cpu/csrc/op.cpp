// The ops through torch's stable ABI: no Python, no ATen.
#include <torch/csrc/stable/library.h>

#include "attention_op.h"
#include "drawn_tokens_op.h"
#include "linear_ops.h"
#include "schema.h"

#ifndef COMPILED_ATTN_NAMESPACE
#define COMPILED_ATTN_NAMESPACE compiled_attn
#endif

extern "C" __attribute__((visibility("default"))) void compiled_attn_set_forms(
    const compiled_attn::Forms* forms) {
  compiled_attn::forms = *forms;
}

STABLE_TORCH_LIBRARY_FRAGMENT(COMPILED_ATTN_NAMESPACE, m) {
  m.def(compiled_attn::kPagedAttentionSchema);
  m.def(compiled_attn::kPagedAttentionWriteSchema);
  m.def(compiled_attn::kPackedLinearSchema);
  m.def(compiled_attn::kPackedLinearsSchema);
  m.def(compiled_attn::kPackedGatedSchema);
  m.def(compiled_attn::kPackedRowsSchema);
  m.def(compiled_attn::kDrawnTokensSchema);
}

STABLE_TORCH_LIBRARY_IMPL(COMPILED_ATTN_NAMESPACE, CPU, m) {
  m.impl("paged_attention", TORCH_BOX(&compiled_attn::paged_attention));
  m.impl("paged_attention_", TORCH_BOX(&compiled_attn::paged_attention_));
  m.impl("packed_linear", TORCH_BOX(&compiled_attn::packed_linear));
  m.impl("packed_linears", TORCH_BOX(&compiled_attn::packed_linears));
  m.impl("packed_gated", TORCH_BOX(&compiled_attn::packed_gated));
  m.impl("packed_rows", TORCH_BOX(&compiled_attn::packed_rows));
  m.impl("drawn_tokens", TORCH_BOX(&compiled_attn::drawn_tokens));
}
