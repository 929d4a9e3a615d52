"""The op as the dispatcher has it, for the conformance kit on a device.

python -m compiled_attn.testing benchmarks/accelerator/dispatched.py:paged_attention_ --device cuda
"""

from __future__ import annotations

import torch

from compiled_attn.ops import load
from compiled_attn.testing.kit.own import CAPABILITIES

__all__ = ["CAPABILITIES", "paged_attention", "paged_attention_"]

load()
paged_attention = torch.ops.compiled_attn.paged_attention
paged_attention_ = torch.ops.compiled_attn.paged_attention_
