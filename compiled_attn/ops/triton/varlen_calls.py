"""The kinds of calls of a warmup that torch's varlen serves, and why it serves no others."""

from __future__ import annotations

import torch

from compiled_attn.ops.triton.tiles import Problem

__all__ = ["REFUSED", "VarlenCalls"]

REFUSED: dict[tuple[torch.device, Problem], str] = {}
"""What varlen, or a lack of memory, said where a problem was to be measured in this process."""


class VarlenCalls:
    """Kinds of calls: the sizes of a bucket, and why varlen does not serve them."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[Problem, str | None], None] = {}

    def add(self, problem: Problem, why_not: str | None) -> None:
        """Counts a kind of calls once; why_not: None where varlen serves it."""
        self._kinds[problem, why_not] = None

    def notes(self) -> dict[str, str]:
        """A note of name "varlen" for a report; none without calls."""
        if not self._kinds:
            return {}
        reasons = [why_not for _, why_not in self._kinds]
        counts = {why: reasons.count(why) for why in dict.fromkeys(reasons) if why is not None}
        told = [f"serves {reasons.count(None)} of {len(reasons)} kinds of calls"]
        told += [f"{count} not, as it {why}" for why, count in counts.items()]
        return {"varlen": "; ".join(told)}
