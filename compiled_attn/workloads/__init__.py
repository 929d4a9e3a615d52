"""Demands on an engine: arrivals from a trace or a seeded generator, and their prompts.

A demand is a list of :class:`Arrival`: times, lengths, prefixes. :func:`prompts` makes its tokens.
"""

from __future__ import annotations

from compiled_attn.workloads.arrival import Arrival, fit, fit_scale, scaled
from compiled_attn.workloads.prompts import prompts
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
