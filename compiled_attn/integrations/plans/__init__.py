"""Buckets for other people's engines: their ladders, their rule of picking, their syntax."""

from __future__ import annotations

from compiled_attn.integrations.plans.base import EnginePart, EnginePlan, Limits
from compiled_attn.integrations.plans.formats import FORMATS, Format, planned_for

__all__ = ["FORMATS", "EnginePart", "EnginePlan", "Format", "Limits", "planned_for"]
