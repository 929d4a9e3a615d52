"""Drafts of a fuzzed engine: as many as its steps hold, whatever they cost, and partly right."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from compiled_attn.engine.request_state import RequestState
from compiled_attn.engine.speculation.drafter import Ngrams
from compiled_attn.engine.speculation.gain import StepCosts
from compiled_attn.engine.speculation.state import DraftState

__all__ = ["FreeRows", "RepeatedPrompts"]


class FreeRows(StepCosts):
    """Says that a step takes as long however many rows it has, so that all drafts pay.

    So what is drafted does not depend on the times of this machine.
    """

    def is_known(self, rows: int) -> bool:
        """Returns True."""
        return True

    def seconds(self, rows: int, more: int) -> NDArray[np.float64]:
        """Returns a second each."""
        return np.ones(1 + more)


class RepeatedPrompts(Ngrams):
    """Drafts what an earlier request of the same prompt got, every third time with a wrong token;
    for a new prompt as `Ngrams`.
    """

    def __init__(self) -> None:
        self._texts: dict[tuple[int, ...], list[int]] = {}

    def kind(self, sequence: RequestState, state: DraftState) -> int:
        """See `DraftSource.kind`."""
        prompt = tuple(sequence.tokens[: sequence.prompt_len])
        if len(self._texts.get(prompt, ())) < len(sequence.tokens):
            self._texts[prompt] = sequence.tokens
        return super().kind(sequence, state) or int(self._texts[prompt] is not sequence.tokens)

    def drafts(self, lengths: Mapping[RequestState, int]) -> dict[RequestState, list[int]]:
        """See `DraftSource.drafts`."""
        drafts = super().drafts(lengths)
        for sequence, count in lengths.items():
            text, length = sequence.tokens, len(sequence.tokens)
            known = self._texts[tuple(text[: sequence.prompt_len])][length : length + count]
            if known and (sequence.request_id + length) % 3 == 0:
                known[-1] = text[0]
            drafts[sequence] = known or drafts[sequence]
        return drafts
