"""Records which kinds of calls of a warmup torch's varlen supports, and why not the others."""

from __future__ import annotations

import torch

from compiled_attn.ops.triton.tiles import Problem

__all__ = ["REFUSED", "VarlenCalls"]

REFUSED: dict[tuple[torch.device, Problem], str] = {}
"""Why a problem could not be measured with varlen in this process."""


class VarlenCalls:
    """Kinds of calls: the sizes of a bucket, and why varlen does not support them."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[Problem, str | None], None] = {}

    def add(self, problem: Problem, why_not: str | None) -> None:
        """Counts a kind of calls once; why_not: None if varlen supports it."""
        self._kinds[problem, why_not] = None

    def notes(self) -> dict[str, str]:
        """Returns a note "varlen" for the report; none without calls."""
        if not self._kinds:
            return {}
        reasons = [why_not for _, why_not in self._kinds]
        counts = {why: reasons.count(why) for why in dict.fromkeys(reasons) if why is not None}
        notes = [f"serves {reasons.count(None)} of {len(reasons)} kinds of calls"]
        notes += [f"{count} not, as it {why}" for why, count in counts.items()]
        return {"varlen": "; ".join(notes)}
