"""Workloads: requests (`Arrival`) from a trace or a seeded generator, and their prompts."""

from __future__ import annotations

from compiled_attn.workloads.arrival import Arrival, fit, fit_scale, prompts, scaled
from compiled_attn.workloads.synthetic import KINDS, synthetic
from compiled_attn.workloads.trace import TraceError, read_trace

__all__ = [
    "KINDS",
    "Arrival",
    "TraceError",
    "fit",
    "fit_scale",
    "prompts",
    "read_trace",
    "scaled",
    "synthetic",
]
