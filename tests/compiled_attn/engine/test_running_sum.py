"""The head of a row gives the token that the whole row does, or is not asked."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_attn.engine import SamplingParams
from compiled_attn.engine.ranking import RankedRows
from compiled_attn.engine.running_sum import RunningSum

NOBODY = np.zeros(0, np.int64)
VOCAB = 4096
NUMBERS = [0.0, 1e-9, 0.3, 0.9, 0.97, 0.999999, 1 - 2**-53]


def logits_of(kind: str, seed: int) -> torch.Tensor:
    drawn = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed))
    return {
        "spread": 3 * drawn,
        "flat": drawn / 100,
        "equal": torch.zeros(1, VOCAB),
        "ties": (2 * drawn).round(),
        "banned": drawn.masked_fill(drawn < 1, -torch.inf),
        "wide": 1e4 * drawn,
        "near": torch.cat([torch.zeros(1, 1), drawn[:, 1:] - 30], 1),
    }[kind]


@pytest.mark.parametrize("kind", ["spread", "flat", "equal", "ties", "banned", "wide", "near"])
@given(st.data())
@settings(max_examples=25, deadline=None)
def test_a_token_of_the_head_is_that_of_the_whole_row(kind, data):
    ranked = RankedRows(logits_of(kind, data.draw(st.integers(0, 9))))
    values = ranked.row(0)
    head = ranked.head(0, values)
    params = SamplingParams(
        temperature=data.draw(st.sampled_from([0.01, 0.8, 1.0, 30.0, 1e-200, 1e30])),
        top_k=data.draw(st.sampled_from([0, 0, 1, 40, 1025, 4000])),
        top_p=data.draw(st.sampled_from([1.0, 0.1, 0.9, 0.9999])),
        min_p=data.draw(st.sampled_from([0.0, 1e-7, 0.1])),
    )
    ordered = RunningSum(VOCAB)
    for number in [*NUMBERS, data.draw(st.floats(0, 1, exclude_max=True))]:
        whole = ordered.token(values, NOBODY, params, number)
        assert ordered.token(values, head, params, number) == whole


def test_the_head_is_the_largest_of_a_row_and_a_small_part_of_it():
    ranked = RankedRows(logits_of("spread", 0))
    values = ranked.row(0)
    head = ranked.head(0, values)
    assert 0 < len(head) < VOCAB // 8 and (np.diff(head) > 0).all()
    assert values[head].min() > np.delete(values, head).max()
    assert len(RankedRows(torch.zeros(1, VOCAB)).head(0, np.zeros(VOCAB, np.float32))) == 0
    assert len(RankedRows(torch.zeros(1, 99)).head(0, np.zeros(99, np.float32))) == 0


def test_most_rows_are_not_looked_at_whole(monkeypatch):
    looked, own = [], RunningSum._begin

    def counted(self, values, temperature):
        looked.append(len(values))
        own(self, values, temperature)

    monkeypatch.setattr(RunningSum, "_begin", counted)
    ranked, ordered = RankedRows(logits_of("spread", 1)), RunningSum(VOCAB)
    values = ranked.row(0)
    head = ranked.head(0, values)
    for number in np.linspace(0, 1, 100, endpoint=False):
        ordered.token(values, head, SamplingParams(temperature=0.8), float(number))
    assert looked.count(VOCAB) < 15 and looked.count(len(head)) == 100
