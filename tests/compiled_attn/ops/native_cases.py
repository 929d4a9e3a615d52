"""The cases that every implementation of the ops must get right."""

from __future__ import annotations

from typing import Any

import torch

MIXED = [(1, 9), (3, 3), (1, 1), (5, 13), (2, 8)]
"""A decode, a prompt, a first token, a chunk, drafts."""


def _slopes() -> torch.Tensor:
    return torch.tensor([0.5, 0.25, 0.125, 0.0625])


def _sinks() -> torch.Tensor:
    return torch.tensor([0.3, -1.0, 2.0, 0.0])


CASES: dict[str, dict[str, Any]] = {
    "mixed": {"requests": MIXED},
    "decodes": {"requests": [(1, 40), (1, 7), (1, 16), (1, 1)]},
    "prompt": {"requests": [(37, 37)]},
    "long decode": {"requests": [(1, 700)], "size": 16},
    "one head each": {"requests": MIXED, "kv_heads": 4},
    "one KV head": {"requests": MIXED, "kv_heads": 1},
    "eight heads a KV head": {"requests": MIXED, "heads": 8, "kv_heads": 1},
    "block 1": {"requests": MIXED, "size": 1},
    "block 7": {"requests": MIXED, "size": 7},
    "block 256": {"requests": MIXED, "size": 256},
    "head size 80": {"requests": MIXED, "dim": 80},
    "head size 7": {"requests": MIXED, "dim": 7},
    "head size 256": {"requests": MIXED, "dim": 256},
    "smaller values": {"requests": MIXED, "value_dim": 8},
    "bfloat16": {"requests": MIXED, "dtype": torch.bfloat16, "dim": 64},
    "float16": {"requests": MIXED, "dtype": torch.float16, "dim": 64},
    "HND": {"requests": MIXED, "layout": "HND"},
    "strided": {"requests": MIXED, "layout": "strided"},
    "strided bfloat16": {"requests": MIXED, "layout": "strided", "dtype": torch.bfloat16},
    "not causal": {"requests": [*MIXED, (4, 2)], "causal": False},
    "window 1": {"requests": MIXED, "window": 1},
    "window 4": {"requests": [*MIXED, (40, 40)], "window": 4},
    "window of all": {"requests": MIXED, "window": 1000},
    "softcap": {"requests": MIXED, "softcap": 0.5},
    "ALiBi": {"requests": MIXED, "alibi_slopes": _slopes()},
    "ALiBi and window": {"requests": MIXED, "alibi_slopes": _slopes(), "window": 3},
    "ALiBi, not causal": {"requests": MIXED, "alibi_slopes": _slopes(), "causal": False},
    "sinks": {"requests": [*MIXED, (3, 1)], "sinks": _sinks(), "padding": 2},
    "everything": {
        "requests": [*MIXED, (70, 90)], "sinks": _sinks(), "alibi_slopes": _slopes(), "softcap":
        2.0, "window": 6, "padding": 1, "padded_requests": 2,
    },
    "padding": {"requests": MIXED, "padding": 4, "padded_requests": 3},
    "padding alone": {"requests": [], "padding": 3, "padded_requests": 2},
    "no keys": {"requests": [(2, 0), (1, 5)]},
    "more queries than keys": {"requests": [(6, 2), (1, 5)]},
    "inf in unused slots": {"requests": MIXED, "poison": float("inf"), "padding": 1},
    "int8": {"requests": MIXED, "cache_dtype": torch.int8},
    "int8 for bfloat16": {"requests": MIXED, "cache_dtype": torch.int8, "dtype": torch.bfloat16},
    "int8 for bfloat16, heads of other sizes": {
        "requests": MIXED, "cache_dtype": torch.int8, "dtype": torch.bfloat16, "heads": 10,
        "dim": 72, "value_dim": 24,
    },
    "int8 HND": {"requests": MIXED, "cache_dtype": torch.int8, "layout": "HND"},
    "e4m3": {"requests": MIXED, "cache_dtype": torch.float8_e4m3fn, "dim": 64},
    "e5m2": {"requests": MIXED, "cache_dtype": torch.float8_e5m2, "dim": 64},
    "e4m3 for bfloat16": {
        "requests": MIXED, "cache_dtype": torch.float8_e4m3fn, "dtype": torch.bfloat16,
    },
    "prompt of int8": {"requests": [(90, 90)], "cache_dtype": torch.int8, "dim": 32},
    "long prompt in bfloat16": {
        "requests": [(100, 150)], "dtype": torch.bfloat16, "dim": 64, "size": 16,
    },
}  # fmt: skip
