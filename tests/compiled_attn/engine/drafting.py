"""Engines whose drafts are partly right, for tests of what becomes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from compiled_attn.engine import Engine, GenerationResult
from compiled_attn.engine.request_state import RequestState
from compiled_attn.engine.speculation.state import DraftState
from compiled_attn.testing.fuzz.drafts import FreeRows
from tests.compiled_attn.engine.small import small_engine


class Known:
    """Drafts what each request is known to be continued with, with wrong tokens among them."""

    def __init__(self, texts: Mapping[int, Sequence[int]], wrong: float) -> None:
        self.texts, self.wrong = texts, wrong
        self.rng = np.random.default_rng(0)

    seconds_per_token = 0.0

    def kind(self, sequence: RequestState, state: DraftState) -> int:
        return int(sequence.index in self.texts)

    def drafts(self, lengths: Mapping[RequestState, int]) -> dict[RequestState, list[int]]:
        return {each: self._draft(each, count) for each, count in lengths.items()}

    def _draft(self, sequence: RequestState, count: int) -> list[int]:
        start = len(sequence.tokens)
        text = [*self.texts[sequence.index], 1, 2, 3, 4, 5][start : start + count]
        return [(token + 1) % 128 if self.rng.random() < self.wrong else token for token in text]


def drafting_engine(
    results: Sequence[GenerationResult], wrong: float, model: Any = None, **config: Any
) -> Engine:
    """A warm engine that drafts the tokens of these results, a share of them wrong."""
    engine = small_engine(model, **{"speculate": "ngram:4", "max_graphs": 16, **config})
    draft_known(engine, results, wrong)
    return engine


def draft_known(engine: Engine, results: Sequence[GenerationResult], wrong: float) -> None:
    """Makes a warm engine draft these tokens, by the index of each result."""
    texts = {each.index: [*each.prompt, *each.tokens] for each in results}
    engine._drafter._source = Known(texts, wrong)
    engine._drafter._costs = FreeRows(engine.sizing.buckets, {})
