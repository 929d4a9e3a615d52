"""Known interfaces, thin over the op and the parts: FlashAttention and vLLM."""
