"""Requests with rules, log-probabilities and several continuations, served by an engine."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from compiled_attn.engine import ConfigError, Engine, SamplingParams
from tests.compiled_attn.engine.counting import CONFIG, Counting
from tests.compiled_attn.engine.small import small_engine

_engine = partial(small_engine, max_tokens_per_step=16, num_blocks=60)

PROMPTS = [[3, 5, 3, 9] * 5, [7, 1, 2], [11] * 9, [*range(20, 57)]]


@pytest.fixture(scope="module", params=["native", "portable"])
def engine(request, model) -> Engine:
    return _engine(model, kernel=request.param)


def _rows(model, text: list[int]) -> torch.Tensor:
    """Log-probabilities ``[T, vocab]`` of the model by itself: dense, uncached, all at once."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            return model(torch.tensor([text]), use_cache=False).logits[0].log_softmax(-1)
    finally:
        model.set_attn_implementation(before)


def _assert_scored(scored, row: torch.Tensor, token: int, count: int) -> None:
    assert scored.token == token and len(scored.top) == count
    assert scored.logprob == pytest.approx(float(row[token]), abs=1e-4)
    best = row.topk(count)
    assert [each for _, each in scored.top] == pytest.approx(best.values.tolist(), abs=1e-4)
    assert [each for each, _ in scored.top] == best.indices.tolist()


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_each_token_is_returned_with_the_log_probability_that_the_dense_model_gives_it(
    engine, model, temperature
):
    params = SamplingParams(
        max_new_tokens=6, temperature=temperature, seed=5, logprobs=3, prompt_logprobs=2
    )
    received: dict[int, list] = {}
    results = {}
    for event in engine.stream(PROMPTS, [*[params] * 3, SamplingParams(max_new_tokens=6)]):
        received.setdefault(event.index, []).append(event.logprobs)
        if event.result is not None:
            results[event.index] = event.result
    for index, prompt in enumerate(PROMPTS[:3]):
        result = results[index]
        rows = _rows(model, prompt + result.tokens)
        assert received[index] == result.logprobs and result.prompt_logprobs[0] is None
        assert len(result.prompt_logprobs) == len(prompt) and len(result.logprobs) == 6
        for at, scored in enumerate([*result.prompt_logprobs, *result.logprobs][1:], start=1):
            text = prompt + result.tokens
            _assert_scored(scored, rows[at - 1], text[at], 2 if at < len(prompt) else 3)
    assert results[3].logprobs is results[3].prompt_logprobs is None and set(received[3]) == {None}


def test_a_prompt_of_which_all_is_cached_is_scored_whole(engine, model):
    params = SamplingParams(max_new_tokens=1, prompt_logprobs=0)
    for _ in range(2):
        (result,) = engine.generate([PROMPTS[3]], params)
        rows = _rows(model, PROMPTS[3])
        expected = [float(rows[at, token]) for at, token in enumerate(PROMPTS[3][1:])]
        assert [each.logprob for each in result.prompt_logprobs[1:]] == pytest.approx(
            expected, abs=1e-4
        )


def test_penalties_are_those_of_generate_whatever_is_preempted(model):
    crowded = _engine(model, num_blocks=22)  # not enough for all of them
    params = SamplingParams(
        max_new_tokens=24, repetition_penalty=1.4, logprobs=0, prompt_logprobs=0
    )
    results = [*crowded.generate(PROMPTS, params, in_order=True)]
    assert crowded.report().preemptions > 0
    model.set_attn_implementation("eager")
    for prompt, result in zip(PROMPTS, results, strict=True):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            whole = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=24,
                do_sample=False,
                repetition_penalty=1.4,
            )[0].tolist()
        assert result.tokens == whole[len(prompt) :]
        rows = _rows(model, whole)
        both = [*result.prompt_logprobs[1:], *result.logprobs]
        expected = [float(rows[at, token]) for at, token in enumerate(whole[1:])]
        assert [each.logprob for each in both] == pytest.approx(expected, abs=1e-4)


def test_no_end_is_drawn_before_min_tokens(engine):
    plain = SamplingParams(max_new_tokens=9)
    (free,) = engine.generate([PROMPTS[0]], plain)
    ends = (free.tokens[0], free.tokens[4])
    (held,) = engine.generate(
        [PROMPTS[0]], SamplingParams(max_new_tokens=9, min_tokens=4, stop_token_ids=ends)
    )
    assert not set(ends) & set(held.tokens[:4]) and len(held.tokens) >= 4


def test_continuations_are_those_of_their_seeds_in_order_and_share_the_blocks_of_the_prompt(model):
    params = SamplingParams(max_new_tokens=5, temperature=1.5, seed=2**64 - 2)
    many = SamplingParams(max_new_tokens=5, temperature=1.5, seed=2**64 - 2, n=3)
    engine = _engine(model)
    prompts = [PROMPTS[3], PROMPTS[1]]
    results = [*engine.generate(prompts, [many, params], in_order=True)]
    assert [(each.index, each.choice) for each in results] == [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert len({tuple(each.tokens) for each in results[:3]}) == 3
    stats = engine.pool.stats()
    assert stats.hit_tokens >= 2 * 36 and stats.used == 0  # all but the last token of 37
    alone = _engine(model)
    for result, seed in zip(results[:3], [2**64 - 2, 2**64 - 1, 0], strict=True):
        assert (result.sampling.seed, result.sampling.n) == (seed, 1)
        one = SamplingParams(max_new_tokens=5, temperature=1.5, seed=seed)
        assert next(alone.generate([PROMPTS[3]], one)).tokens == result.tokens


@pytest.mark.parametrize("settings", [{}, {"concurrency": 1}, {"arrivals": [0.0, 0.01, 0.0]}])
def test_each_continuation_comes_once_however_they_arrive(settings):
    engine = Engine(Counting(), CONFIG)
    engine.warmup()
    params = [SamplingParams(max_new_tokens=3, n=n) for n in (2, 1, 4)]
    results = engine.generate([[1], [2], [3]], params, in_order=True, **settings)
    names = [(each.index, each.choice, each.tokens[0]) for each in results]
    assert names == [(0, 0, 2), (0, 1, 2), (1, 0, 3), *((2, choice, 4) for choice in range(4))]


def test_continuations_of_a_prompt_that_was_aborted_are_served(model):
    engine = _engine(model)
    stream = engine.stream([PROMPTS[1]], SamplingParams(max_new_tokens=4, n=2))
    first = next(stream)
    engine.abort(first.request_id)
    assert {event.choice for event in stream} == {1}


def test_what_cannot_be_served_is_refused_before(engine):
    with pytest.raises(ConfigError, match=r"logit_bias for token ids in 0\.\.127, got 128"):
        engine.submit([1], SamplingParams(logit_bias={128: 1.0}))
    for end in (-1, 128, 2**70):
        params = SamplingParams(stop_token_ids=(end,), min_tokens=2)
        with pytest.raises(ConfigError, match=rf"stop_token_ids of .* in 0\.\.127, got {end}: "):
            engine.submit([1], params)
    with pytest.raises(ConfigError, match=r"n = 1 .* use generate or stream"):
        engine.submit([1], SamplingParams(n=2))
