"""What a drafter remembers of one request."""

from __future__ import annotations

from dataclasses import dataclass, field

from compiled_attn.engine.speculation.gain import Acceptance
from compiled_attn.engine.speculation.ngrams import NgramIndex

__all__ = ["DraftState"]


@dataclass(slots=True)
class DraftState:
    """Its share of accepted tokens, the kind of its last draft, and the index of its n-grams.

    Args:
        found: position of the text that follows the last n-gram.
    """

    acceptance: Acceptance = field(default_factory=Acceptance)
    kind: int = 0
    index: NgramIndex = field(default_factory=NgramIndex)
    found: int = 0
