"""Sampling: greedy, truncated, seeded, independent of the batch; its settings as tensors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_attn.engine import SamplingParams
from compiled_attn.engine.sampler import NOT_FINITE
from compiled_attn.engine.sampling_rows import SamplingRows, uniforms
from compiled_attn.ops.sampling import greedy, reference
from tests.compiled_attn.engine.sampled import sample, sample_rows


def _draws(logits: torch.Tensor, count: int, **params) -> np.ndarray:
    many = [SamplingParams(temperature=params.pop("temperature", 1.0), **params)] * count
    return np.array(sample(logits.expand(count, -1), many, list(range(count))))


@pytest.mark.parametrize(
    ("chances", "settings", "expected"),
    [
        ([0.5, 0.3, 0.15, 0.05], {}, [0.5, 0.3, 0.15, 0.05]),
        ([0.6, 0.4], {"temperature": 0.5}, [0.36 / 0.52, 0.16 / 0.52]),
        ([0.1, 0.4, 0.2, 0.3], {"top_k": 2}, [0, 4 / 7, 0, 3 / 7]),
    ],
)
def test_samples_follow_the_truncated_softmax(chances, settings, expected):
    counts = np.bincount(_draws(torch.log(torch.tensor(chances)), 6000, **settings)) / 6000
    np.testing.assert_allclose(counts, expected, atol=0.025)


def test_top_p_keeps_the_smallest_set_that_reaches_p():
    logits = torch.log(torch.tensor([0.1, 0.4, 0.2, 0.3]))
    assert set(_draws(logits, 500, top_p=0.65)) == {1, 3}
    assert set(_draws(logits, 500, top_p=0.71)) == {1, 2, 3}
    assert set(_draws(logits, 100, top_p=1e-9)) == {1}


NAN, INF = float("nan"), float("inf")
BAD = {
    "max_new_tokens": [0, "3"],
    "temperature": [-1.0, "1", NAN, 10**400, np.True_, torch.tensor([1.0, 2.0])],
    "top_k": [-1, 1.5, True, torch.tensor(True)],
    "top_p": [0.0, 1.1],
    "seed": [-1],
    "stop_token_ids": [b"ab", (1.5,)],
    "stop": [("",), 7, ("a", 7)],
    "ignore_eos": ["no", np.array([1, 2])],
    "min_p": [1.5, "0"],
    "repetition_penalty": [0, INF, 1e39, 1e-50],
    "presence_penalty": [2.1],
    "frequency_penalty": [NAN],
    "logit_bias": [{-1: 0.0}, {1: INF}, {1: 1e39}, {1: NAN}, {1.5: 1.0}, [1, 2], "12"],
    "min_tokens": [17, -1],
    "logprobs": [-1, True],
    "prompt_logprobs": [1.5],
    "n": [0],
}


@pytest.mark.parametrize("name", BAD)
def test_values_out_of_range_are_refused(name):
    for value in BAD[name]:
        with pytest.raises(ValueError, match=f"expected {name}: .*, got "):
            SamplingParams(**{name: value})


def test_a_tiny_temperature_is_greedy_and_logits_that_are_nan_are_an_error():
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    assert sample(logits, [SamplingParams(temperature=1e-40)], [0]) == [1]
    (row,) = sample_rows(logits * float("nan"), [SamplingParams(temperature=1.0)], [0])
    assert row.error is NOT_FINITE


def test_numbers_of_numpy_are_taken_as_pythons():
    params = SamplingParams(np.int64(3), np.float32(0.5), stop_token_ids=[np.int32(7), 8])
    assert (params.max_new_tokens, params.temperature) == (3, 0.5)
    assert params.stop_token_ids == (7, 8) and type(params.max_new_tokens) is int


def test_one_stop_string_may_stand_alone():
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")


def by_sorting(logits: torch.Tensor, params: SamplingParams, step: int) -> int:
    """Reference: the whole row sorted, cut, and sampled from with the request's own number."""
    scaled = (logits.double() - logits.double().max()) / params.temperature
    ordered, tokens = torch.sort(scaled, descending=True, stable=True)
    if params.top_k:
        ordered = ordered[: params.top_k]
    probabilities = torch.softmax(ordered, -1)
    before = probabilities.cumsum(-1) - probabilities
    truncation = probabilities[before < params.top_p].cumsum(-1)
    uniform = np.random.Generator(np.random.Philox(key=params.seed, counter=step)).random()
    index = int(torch.searchsorted(truncation, uniform * float(truncation[-1]), right=True))
    return int(tokens[min(index, len(truncation) - 1)])


ROWS = st.tuples(
    st.sampled_from([0.0, 0.02, 0.7, 1.0, 1.3, 50.0]),
    st.sampled_from([0, 0, 1, 2, 7, 50, 1000, 1500, 10**9]),
    st.sampled_from([1.0, 1.0, 0.9991, 0.8973, 0.5021, 1e-9]),
    st.integers(0, 2**64 - 1),
    st.integers(0, 300),
)


@given(
    rows=st.lists(ROWS, min_size=1, max_size=6),
    vocab=st.sampled_from([1, 5, 300, 2047, 2048, 2100, 5003]),
    spread=st.sampled_from([0.0, 0.01, 3.0, 30.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    seed=st.integers(0, 99),
)
@settings(deadline=None)
def test_each_token_is_that_of_the_sorted_row_whatever_its_neighbours(
    rows, vocab, spread, dtype, seed
):
    logits = spread * torch.randn(len(rows), vocab, generator=torch.Generator().manual_seed(seed))
    logits = logits.to(dtype)  # 16 bits: many are equal
    if vocab > 2:
        logits[0, vocab // 2 :] = -torch.inf
    params = [SamplingParams(9, t, top_k=k, top_p=p, seed=s) for t, k, p, s, _ in rows]
    steps = [row[-1] for row in rows]
    expected = [
        by_sorting(row, param, step) if param.temperature else int(row.argmax())
        for row, param, step in zip(logits, params, steps, strict=True)
    ]
    assert sample(logits, params, steps) == expected
    assert [sample(logits[n : n + 1], [params[n]], [steps[n]])[0] for n in range(len(rows))] == (
        expected
    )


def test_a_row_that_is_nan_ends_alone_among_rows_of_a_wide_vocabulary():
    logits = torch.randn(4, 5000)
    logits[1, 4999] = torch.nan
    logits[2, 7] = torch.inf
    params = [SamplingParams(temperature=1.0, top_k=5, seed=3)] * 3 + [None]
    rows = sample_rows(logits, params, [0] * 4)
    assert rows[1].error is rows[2].error is NOT_FINITE
    tokens = by_sorting(logits[0], params[0], 0), int(logits[3].argmax())
    assert (rows[0].token, rows[3].token) == tokens


def test_max_tokens_is_another_name_of_max_new_tokens():
    assert SamplingParams(max_tokens=7) == SamplingParams(max_new_tokens=7)
    assert SamplingParams().max_new_tokens == 16 and type(SamplingParams().max_new_tokens) is int
    assert replace(SamplingParams(max_tokens=7), temperature=0.5).max_new_tokens == 7
    for other in (7, 16):
        with pytest.raises(ValueError, match=rf"got both, {other} and 5: leave one of them out"):
            SamplingParams(max_new_tokens=other, max_tokens=5)
    with pytest.raises(ValueError, match="expected max_new_tokens: an integer >= 1, got 0"):
        SamplingParams(max_tokens=0)


VOCAB = 300
NUMBERS = st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**40))


def logits_of(rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(0))


def test_rows_without_a_draw_give_their_most_likely_token():
    logits = logits_of(4)
    assert torch.equal(reference(logits, *SamplingRows.padding(4)), greedy(logits))
    settings = SamplingRows.of([2], [SamplingParams(temperature=9.0, seed=5)], [0], 4, VOCAB)
    tokens = reference(logits, *settings)
    others = [0, 1, 3]
    assert torch.equal(tokens[others], greedy(logits)[others])
    assert tokens[2] != greedy(logits)[2]


def test_a_top_k_beyond_64_bits_keeps_all():
    params = SamplingParams(temperature=1.0, top_k=10**30, seed=5)
    settings = SamplingRows.of([0], [params], [0], 1, VOCAB)
    assert settings.top_k.tolist() == [VOCAB]
    assert reference(logits_of(1), *settings).tolist() == sample(logits_of(1), [params], [0])


@given(numbers=st.lists(NUMBERS, min_size=1, max_size=8))
def test_each_number_is_that_of_numpys_philox(numbers):
    expected = [
        np.random.Generator(np.random.Philox(key=seed, counter=step)).random()
        for seed, step in numbers
    ]
    assert uniforms(*zip(*numbers, strict=True)).tolist() == expected
