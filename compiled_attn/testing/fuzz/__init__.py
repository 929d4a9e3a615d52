"""Fuzzer for engines with a paged KV cache: random traces, checked tokens, minimal scripts."""

from __future__ import annotations

from compiled_attn.testing.fuzz.generate import generate, random_settings
from compiled_attn.testing.fuzz.runner import Failure, run
from compiled_attn.testing.fuzz.shrink import script, shrink
from compiled_attn.testing.fuzz.target import Reference, Refused, Target
from compiled_attn.testing.fuzz.trace import KINDS, Operation, Settings, Trace, TraceError

__all__ = [
    "KINDS",
    "Failure",
    "Operation",
    "Reference",
    "Refused",
    "Settings",
    "Target",
    "Trace",
    "TraceError",
    "generate",
    "random_settings",
    "run",
    "script",
    "shrink",
]
