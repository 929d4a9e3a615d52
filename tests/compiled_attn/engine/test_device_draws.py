"""The sampler of devices draws what the host's does; here it runs on the CPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compiled_attn.engine import SamplingParams
from compiled_attn.engine.device_draws import NO_TOKEN, DrawRows, drawn_tokens, likely_tokens
from compiled_attn.engine.draws import sample
from compiled_attn.engine.scheduler import ScheduledStep
from compiled_attn.engine.sequence import Sequence
from compiled_attn.engine.uniform import uniforms

VOCAB = 300


def rows_of(params: list[SamplingParams], steps: list[int]) -> DrawRows:
    uniform = uniforms([each.seed or 0 for each in params], steps)
    columns = [
        [each.temperature for each in params],
        [each.top_k or VOCAB for each in params],
        [each.top_p for each in params],
        [each.min_p for each in params],
        uniform.tolist(),
    ]
    dtypes = (torch.float64, torch.int64, torch.float64, torch.float64, torch.float64)
    return DrawRows(*(torch.tensor(c, dtype=d) for c, d in zip(columns, dtypes, strict=True)))


@st.composite
def settings(draw) -> SamplingParams:
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 2.5, 1e-3])),
        top_k=draw(st.sampled_from([0, 1, 2, 17, 299, 300, 1000])),
        top_p=draw(st.sampled_from([1.0, 0.9, 0.5, 1e-6])),
        min_p=draw(st.sampled_from([0.0, 0.01, 0.3, 1.0])),
        seed=draw(st.integers(0, 2**64 - 1)),
    )


@given(
    params=st.lists(settings(), min_size=1, max_size=6),
    seed=st.integers(0, 2**32),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    spread=st.sampled_from([0.0, 0.1, 3.0]),
)
def test_tokens_are_those_of_the_host(params, seed, dtype, spread):
    chance = torch.Generator().manual_seed(seed)
    logits = (torch.randn(len(params), VOCAB, generator=chance) * spread).to(dtype)
    steps = [*range(len(params))]
    drawn = drawn_tokens(logits, likely_tokens(logits), *rows_of(params, steps))
    assert drawn.tolist() == sample(logits, params, steps)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_has_no_token_and_harms_no_other(bad):
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    params = [SamplingParams(temperature=1.0, seed=n) for n in range(3)]
    expected = drawn_tokens(logits, likely_tokens(logits), *rows_of(params, [0, 1, 2])).tolist()
    logits[1, 7] = bad
    got = drawn_tokens(logits, likely_tokens(logits), *rows_of(params, [0, 1, 2])).tolist()
    assert got == [expected[0], NO_TOKEN, expected[2]]


def test_padding_takes_the_most_likely_token():
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(0))
    likely = likely_tokens(logits)
    assert torch.equal(drawn_tokens(logits, likely, *DrawRows.padding(4)), likely)


def test_masked_tokens_are_never_drawn():
    logits = torch.full((64, VOCAB), -torch.inf)
    logits[:, [3, 250]] = torch.tensor([1.0, 1.5])
    params = [SamplingParams(temperature=5.0, seed=n) for n in range(64)]
    drawn = drawn_tokens(logits, likely_tokens(logits), *rows_of(params, [0] * 64))
    assert set(drawn.tolist()) == {3, 250}


def test_a_top_k_beyond_64_bits_keeps_all():
    sampling = SamplingParams(temperature=1.0, top_k=10**30, seed=5)
    step = ScheduledStep({Sequence(0, [1, 2], 2, sampling, 0.0): 2})
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(0))
    drawn = drawn_tokens(logits, likely_tokens(logits), *DrawRows.of(step, 2, VOCAB))
    assert drawn.tolist()[:1] == sample(logits[:1], [sampling], [0])
