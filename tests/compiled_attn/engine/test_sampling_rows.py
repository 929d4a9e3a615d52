"""Sampling settings as tensors, and uniform numbers equal to those of numpy's generator."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from compiled_attn.engine import SamplingParams
from compiled_attn.engine.sampling_rows import SamplingRows, uniforms
from compiled_attn.ops.sampling import greedy, reference
from tests.compiled_attn.engine.sampled import sample

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
