"""Biases, penalties, ends that wait, min_p: against transformers' processors and plain loops."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from compiled_attn.engine import SamplingParams
from compiled_attn.engine.logit_rules import LogitRules, SeenTokens, shaped
from compiled_attn.engine.sizing import eos_tokens
from tests.compiled_attn.engine.sampled import sample, sample_rows
from tests.compiled_attn.tiny import tiny_model

VOCAB = 60


def _row(params: SamplingParams, prompt: list[int], generated: list[int], logits: torch.Tensor):
    """Logits ``[vocab]`` as the rules of one request make them."""
    rules = LogitRules(params, len(prompt), params.stop_token_ids)
    return shaped(logits[None], [0], [rules], [prompt + generated])[0]


def by_loops(
    params: SamplingParams, prompt: list[int], generated: list[int], logits: torch.Tensor
) -> np.ndarray:
    """Reference in float64: biases, ends that wait, then the penalties token by token."""
    row = logits.double().numpy().copy()
    for token, bias in params.logit_bias:
        row[token] += bias
    if len(generated) < params.min_tokens:
        row[[end for end in params.stop_token_ids if end < len(row)]] = -np.inf
    for token in {*prompt, *generated}:
        factor = params.repetition_penalty
        row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
    for token in set(generated):
        row[token] -= params.frequency_penalty * generated.count(token)
        row[token] -= params.presence_penalty
    return row


tokens = st.lists(st.integers(0, VOCAB - 1), max_size=12)
rules = st.builds(
    SamplingParams,
    max_new_tokens=st.just(20),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.5, -1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.25, -0.5]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=4),
    min_tokens=st.integers(0, 12),
    stop_token_ids=st.lists(st.integers(0, 2 * VOCAB), max_size=3).map(tuple),
)


@given(st.lists(st.tuples(rules, tokens, tokens), min_size=1, max_size=5), st.integers(0, 99))
@settings(deadline=None)
def test_all_rows_at_once_are_as_the_reference_makes_each(rows, seed):
    logits = 4 * torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(seed))
    before = logits.clone()
    made = shaped(
        logits,
        range(len(rows)),
        [LogitRules(params, len(prompt), params.stop_token_ids) for params, prompt, _ in rows],
        [prompt + generated for _, prompt, generated in rows],
    )
    assert torch.equal(logits, before) and made.dtype == torch.float32
    for row, own, (params, prompt, generated) in zip(made, logits, rows, strict=True):
        np.testing.assert_allclose(
            row.numpy(), by_loops(params, prompt, generated, own), rtol=2e-5, atol=2e-5
        )


@pytest.mark.parametrize("penalty", [1.3, 0.8])
def test_the_repetition_penalty_is_that_of_transformers(penalty):
    prompt, generated, logits = [3, 7, 7], [9, 3, 11], 5 * torch.randn(VOCAB)
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(
        torch.tensor([prompt + generated]), logits[None].clone()
    )[0]
    ours = _row(SamplingParams(repetition_penalty=penalty), prompt, generated, logits)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("generated", [[], [5], [5, 6, 7], [5, 6, 7, 8]])
def test_ends_wait_as_in_transformers(generated):
    prompt, ends, logits = [1, 2], (4, 9), torch.randn(VOCAB)
    theirs = MinNewTokensLengthLogitsProcessor(len(prompt), 3, [*ends], device="cpu")(
        torch.tensor([prompt + generated]), logits[None].clone()
    )[0]
    params = SamplingParams(min_tokens=3, stop_token_ids=ends)
    assert torch.equal(_row(params, prompt, generated, logits), theirs)


def test_biases_are_those_of_transformers():
    logits = torch.randn(VOCAB)
    theirs = SequenceBiasLogitsProcessor({(3,): 2.5, (8,): -7.0})(
        torch.tensor([[1, 2]]), logits[None].clone()
    )[0]
    ours = _row(SamplingParams(logit_bias={8: -7.0, 3: 2.5}), [1, 2], [], logits)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("vocab", [40, 3000])
@pytest.mark.parametrize(
    "truncation", [{}, {"top_k": 20}, {"top_p": 0.8}, {"top_k": 30, "top_p": 0.9}]
)
def test_min_p_keeps_what_transformers_keep(vocab, truncation):
    logits = 2 * torch.randn(1, vocab, generator=torch.Generator().manual_seed(3))
    warped = TemperatureLogitsWarper(0.9)(None, logits)
    if "top_k" in truncation:
        warped = TopKLogitsWarper(truncation["top_k"])(None, warped)
    if "top_p" in truncation:
        warped = TopPLogitsWarper(truncation["top_p"])(None, warped)
    warped = MinPLogitsWarper(0.15)(None, warped)[0]
    expected = set(warped.isfinite().nonzero().flatten().tolist())
    params = [
        SamplingParams(temperature=0.9, min_p=0.15, seed=n, **truncation) for n in range(3000)
    ]
    sampled = np.bincount(sample(logits.expand(3000, -1), params, [0] * 3000), minlength=vocab)
    assert set(np.flatnonzero(sampled).tolist()) <= expected
    assert set((warped.softmax(-1) > 0.01).nonzero().flatten().tolist()) <= set(
        np.flatnonzero(sampled).tolist()
    )
    assert abs(sampled / 3000 - warped.softmax(-1).numpy()).max() < 0.04


def test_tokens_are_counted_one_by_one_as_they_are_all_at_once():
    rng = np.random.default_rng(0)
    text = rng.integers(0, 50, 300).tolist()
    seen = SeenTokens(20)
    for length in [20, 21, 22, 25, 100, 101, 300, 40, 41]:
        seen.of(text[:length])
        ids, counts = seen.of(text[:length])
        assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == {
            token: text[20:length].count(token) for token in set(text[:length])
        }


def test_a_row_without_rules_is_as_if_its_neighbours_had_none():
    logits = torch.randn(3, 3000)
    sampled = SamplingParams(temperature=0.8, seed=4)
    ruled = SamplingParams(logit_bias={int(logits[1].argmax()): -100}, repetition_penalty=1.2)
    rows = sample_rows(logits, [None, ruled, sampled], [0, 1, 5], [(), [4, 5], [7]])
    rows = [row.token for row in rows]
    assert [rows[0], rows[2]] == [int(logits[0].argmax()), *sample(logits[2:], [sampled], [5])]
    assert rows[1] == int(by_loops(ruled, [4], [5], logits[1]).argmax())


def test_a_draw_with_rules_is_one_from_the_changed_logits():
    logits = torch.randn(2, 3000)
    params = SamplingParams(temperature=0.7, top_k=40, seed=8, repetition_penalty=1.5)
    text = logits.argmax(-1).tolist()
    changed = torch.stack([_row(params, text, [], row) for row in logits])
    plain = replace(params, repetition_penalty=1.0)
    assert sample(logits, [params] * 2, [0, 0], [text] * 2) == sample(changed, [plain] * 2, [0, 0])


def test_a_row_of_which_nothing_is_left_ends_alone():
    logits = torch.randn(2, 3)
    nothing = SamplingParams(min_tokens=1, stop_token_ids=(0, 1, 2))
    rows = sample_rows(logits, [nothing, SamplingParams(repetition_penalty=2.0)], [0, 0])
    assert "lower min_tokens" in rows[0].error and rows[1].token == int(logits[1].argmax())


def test_a_bias_is_kept_as_pairs_so_that_settings_can_be_compared_and_hashed():
    given = SamplingParams(logit_bias={np.int64(5): 2, 3: -1.0})
    assert given.logit_bias == ((3, -1.0), (5, 2.0))
    assert given == replace(given) and hash(given) == hash(SamplingParams(logit_bias={3: -1, 5: 2}))


def test_an_end_of_minus_one_is_none_and_bans_no_token():
    logits = torch.zeros(VOCAB)
    logits[-1] = 9
    params = SamplingParams(max_new_tokens=20, min_tokens=5, stop_token_ids=(-1, 3))
    made = _row(params, [1], [], logits)
    assert made.argmax() == VOCAB - 1 and made[3] == -torch.inf
    model = tiny_model()
    model.generation_config.eos_token_id = [-1, 7]
    assert eos_tokens(model) == {7}
    model.generation_config.eos_token_id = -1
    assert eos_tokens(model) == frozenset()
