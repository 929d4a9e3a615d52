"""Accepted and refused drafts leave the distribution of tokens as it is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from compiled_attn.engine import SamplingParams
from compiled_attn.engine.request_state import RequestState
from compiled_attn.engine.sampler import NOT_FINITE, sample_step
from compiled_attn.engine.scheduler import ScheduledStep
from compiled_attn.engine.speculation.verify import sampled

VOCAB, DRAWS, EACH = 6, 200_000, 2_000
LOGITS = torch.tensor([[1.0, 2.0, 0.5, 1.5, -1.0, 0.0], [0.0, -1.0, 3.0, 1.0, 2.0, 0.5],
                       [2.0, 2.0, 0.0, -3.0, 1.0, 1.0]])  # fmt: skip


def requests_of(count: int, **params) -> list[RequestState]:
    """Requests of one token with different seeds."""
    settings = [SamplingParams(max_new_tokens=999, seed=n, **params) for n in range(count)]
    return [RequestState(n, [0], 1, each, 0.0) for n, each in enumerate(settings)]


def step_of(requests: list[RequestState], draft: list[int]) -> ScheduledStep:
    """Their last tokens, with the same draft."""
    starts = [len(each.tokens) - 1 for each in requests]
    drafts = dict.fromkeys(requests, draft) if draft else None
    return ScheduledStep(dict.fromkeys(requests, 1 + len(draft)), starts, drafts)


def chi_square(counts: np.ndarray, chances: np.ndarray) -> float:
    expected = counts.sum() * chances
    assert not counts[expected == 0].any()
    at = expected > 0
    return float(((counts[at] - expected[at]) ** 2 / expected[at]).sum())


@pytest.mark.parametrize(
    ("draft", "params"),
    [([1, 2], {"temperature": 1.0}), ([3, 4], {"temperature": 0.7, "top_k": 4})],
)
def test_the_distribution_is_that_of_the_model_whatever_is_drafted(draft, params):
    requests, counts = requests_of(EACH, **params), np.zeros((3, VOCAB))
    for _ in range(DRAWS // EACH):
        rows = sampled(LOGITS.repeat(EACH, 1), step_of(requests, draft), np.full(EACH, 3))
        for row, request in zip(rows, requests, strict=True):
            request.tokens.append(0)  # another random number
            for place, result in enumerate((row, *row.more)):
                counts[place, result.token] += 1
    assert counts[0].sum() == DRAWS
    weights = (LOGITS / params["temperature"]).softmax(1).double().numpy()
    if top := params.get("top_k"):
        weights[weights < np.sort(weights, 1)[:, [-top]]] = 0
    chances = weights / weights.sum(1, keepdims=True)
    assert counts[1].sum() == counts[0, draft[0]] and counts[2].sum() == counts[1, draft[1]]
    for place in range(3):  # 99.99 % of all chi-square values of 5 degrees of freedom are below
        assert chi_square(counts[place], chances[place]) < 25.7


def test_tokens_of_a_seed_are_those_without_drafts():
    requests = requests_of(50, temperature=1.0)
    rows = sampled(LOGITS.repeat(50, 1), step_of(requests, [1, 2]), np.full(50, 3))
    first = sample_step(LOGITS[:1].repeat(50, 1), step_of(requests, []), np.ones(50, np.int64))
    assert [row.token for row in rows] == [row.token for row in first]
    assert {(len(row.more), row.draft) for row in rows} <= {(0, 0), (1, 1), (2, 1)}


def test_a_row_that_is_not_finite_fails_only_if_it_is_reached():
    logits = LOGITS.clone()
    logits[1] = torch.nan
    best = int(LOGITS[0].argmax())
    for draft, more in (([best, 0], 1), ([best + 1, 0], 0)):
        (row,) = sampled(logits, step_of(requests_of(1), draft), np.array([3]))
        assert row.token == best and len(row.more) == more
        assert all(each.error == NOT_FINITE for each in row.more)
