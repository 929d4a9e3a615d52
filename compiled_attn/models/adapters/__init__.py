"""LoRA adapters: peft's folders, and many of them over one set of captured graphs."""

from __future__ import annotations

from compiled_attn.models.adapters.adapter import Adapter, LoraWeight, adapter_of
from compiled_attn.models.adapters.folder import read_adapter
from compiled_attn.models.adapters.peft_model import PeftAdapters
from compiled_attn.models.adapters.pool import AdapterPool, bytes_of_slots

__all__ = [
    "Adapter", "AdapterPool", "LoraWeight", "PeftAdapters", "adapter_of", "bytes_of_slots",
    "read_adapter",
]  # fmt: skip
