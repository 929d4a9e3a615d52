"""A request that fails ends alone: no neighbour's token changes, nothing of it is found later."""

from __future__ import annotations

import gc
import math

import numpy as np
import pytest
import torch

import compiled_attn.engine.sampling_rows as sampling_rows
from compiled_attn.cache.defrag import OnlineDefragmenter
from compiled_attn.engine import (
    ConfigError,
    Engine,
    EngineConfig,
    GenerationResult,
    RequestState,
    SamplingParams,
    TokenEvent,
)
from compiled_attn.models.hf import ModelChanged
from graphs import CaptureError
from tests.compiled_attn.engine.small import small_engine
from tests.compiled_attn.tiny import plain_generate, tiny_model

POISON = 127
"""Token whose embedding is NaN."""

NEW = 6


def _poisoned_model():
    model = tiny_model()
    model.get_input_embeddings().weight.data[POISON] = math.nan
    return model


def _prompts(count: int) -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(1, POISON, int(rng.integers(2, 30))).tolist() for _ in range(count)]


@pytest.mark.parametrize("kernel", ["auto", "portable"])
def test_a_request_that_turns_into_nan_ends_with_an_error_and_changes_no_other(kernel):
    model, prompts = _poisoned_model(), _prompts(6)
    bad = {1: [*prompts[1][:5], POISON, *prompts[1][5:], *range(1, 40)], 4: [POISON]}
    engine = small_engine(model, kernel=kernel)
    served = [bad.get(index, prompt) for index, prompt in enumerate(prompts)]
    results = list(engine.generate(served, SamplingParams(max_new_tokens=NEW), in_order=True))
    for index, result in enumerate(results):
        if index in bad:
            assert (result.finish_reason, result.tokens) == ("error", [])
            assert "expected finite logits" in result.error
        else:
            assert result.tokens == plain_generate(model, prompts[index], NEW)
            assert result.error == "" and result.finish_reason == "length"
    report = engine.report()
    assert (report.requests, report.failed_requests, report.nonfinite_rows) == (6, 2, 2)
    assert engine.pool.stats().used == 0


@pytest.mark.parametrize("kernel", ["auto", "portable"])
def test_a_prompt_that_begins_like_one_that_failed_finds_nothing_of_it(kernel):
    model = _poisoned_model()
    engine = small_engine(model, kernel=kernel)
    prefix, hits = list(range(1, 41)), []
    for tail in ([POISON, 5, 6, 7], [9], [9], [POISON, 8], [9]):
        (result,) = engine.generate([[*prefix, *tail]], SamplingParams(max_new_tokens=NEW))
        if POISON in tail:
            assert result.finish_reason == "error"
        else:
            assert result.tokens == plain_generate(model, [*prefix, 9], NEW)
        hits.append(engine.pool.stats().hit_tokens)
    assert np.diff([0, *hits]).tolist() == [0, 0, 40, 40, 0]


def test_a_found_block_that_is_not_finite_is_withdrawn():
    engine, prefix = small_engine(), list(range(1, 21))
    list(engine.generate([prefix], SamplingParams(max_new_tokens=1)))
    engine.executor.module.cache.value(1)[4 * 3] = math.nan
    (failed,) = engine.generate([[*prefix, 30]], SamplingParams(max_new_tokens=2))
    assert failed.finish_reason == "error"
    before = engine.pool.stats().hit_tokens
    (result,) = engine.generate([[*prefix, 31]], SamplingParams(max_new_tokens=NEW))
    assert result.tokens == plain_generate(engine.executor.module.model, [*prefix, 31], NEW)
    assert engine.pool.stats().hit_tokens == before


def test_what_fails_while_one_row_is_sampled_ends_that_request_alone(monkeypatch):
    engine, prompts = small_engine(), _prompts(3)
    original = sampling_rows.uniforms

    def failing(seeds, steps):
        if (13, 2) in zip(seeds, steps, strict=True):
            raise IndexError("no such place")
        return original(seeds, steps)

    monkeypatch.setattr(sampling_rows, "uniforms", failing)
    params = [SamplingParams(NEW, temperature=1.0, seed=seed) for seed in (12, 13, 14)]
    results = list(engine.generate(prompts, params, in_order=True))
    assert [result.finish_reason for result in results] == ["length", "error", "length"]
    assert results[1].error == "sampling failed: IndexError: no such place"
    assert len(results[1].tokens) == 2 and engine.report().nonfinite_rows == 0


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("hello", "got str 'hello'"),
        (["123", "45"], "got str '123'"),
        ([1.7], "got float 1.7"),
        ([1, True], "got bool True"),
        ([[1, 2]], "got list"),
        (np.array([1.0, 2.0]), "got float64"),
        (torch.tensor([1.0]).bfloat16(), "bfloat16"),
        (torch.tensor([[1, 2]]), "shape"),
        ([torch.tensor([[5]])], "got Tensor"),
        ([torch.tensor(True)], "got Tensor"),
        (np.ma.array([1, 2], mask=[0, 1]), "integers"),
        (torch.zeros(2, dtype=torch.int64, device="meta"), "prompt with values"),
        (5, "got int 5"),
        ({1, 2}, "got set"),
        (b"ab", "got bytes"),
        (None, "got NoneType"),
    ],
)
def test_prompts_that_are_not_integers_are_refused_in_one_line(prompt, message):
    engine = small_engine()
    for call in (lambda: engine.submit(prompt), lambda: engine.generate([[1], prompt])):
        with pytest.raises(ConfigError, match="expected") as refused:
            call()
        text = str(refused.value)
        assert message in text and "\n" not in text and "pass token ids" in text
    assert not engine.has_work


@pytest.mark.parametrize("prompts", ["hello", 7, [1, 2, 3]])
def test_prompts_that_are_no_list_of_prompts_are_refused(prompts):
    with pytest.raises(ConfigError, match=r"expected a (list of prompts|prompt as a list)"):
        small_engine().generate(prompts)


@pytest.mark.parametrize(
    "prompt",
    [
        (4, 5, 6),
        np.array([4, 5, 6], np.uint8),
        torch.tensor([4, 5, 6], dtype=torch.int16),
        [np.int64(4), torch.tensor(5), 6],
        range(4, 7),
    ],
)
def test_integers_of_every_kind_are_prompts(prompt):
    engine = small_engine()
    (result,) = engine.generate([prompt], SamplingParams(max_new_tokens=2))
    assert result.prompt == [4, 5, 6] and set(map(type, result.prompt)) == {int}


def test_sampling_and_salts_of_the_wrong_kind_are_refused():
    engine = small_engine()
    with pytest.raises(ConfigError, match="SamplingParams, got dict"):
        engine.submit([1], {"temperature": 1})
    with pytest.raises(ConfigError, match="salt as str"):
        engine.submit([1], salt=7)
    with pytest.raises(ConfigError, match="2 salts, one per prompt, got 1"):
        engine.generate([[1], [2]], salt=["a"])


def test_an_index_is_the_position_in_its_call_and_an_id_is_given_once():
    engine, params = small_engine(), SamplingParams(max_new_tokens=2)
    by_hand = engine.submit([1, 2], params)
    while engine.has_work:
        engine.step()
    seen = {by_hand}
    for _ in range(2):
        prompts = _prompts(3)
        for result in engine.generate(prompts, params):
            assert result.prompt == prompts[result.index]
            assert result.request_id not in seen
            seen.add(result.request_id)
    assert seen == set(range(7))


def test_results_come_in_order_if_asked_for():
    engine, prompts = small_engine(), _prompts(6)
    params = [SamplingParams(max_new_tokens=new) for new in (9, 1, 5, 2, 7, 1)]
    finished = [result.index for result in engine.generate(prompts, params)]
    ordered = [result.index for result in engine.generate(prompts, params, in_order=True)]
    assert finished != ordered == sorted(finished) == [0, 1, 2, 3, 4, 5]


def test_an_aborted_request_does_not_hold_back_ordered_results():
    engine = small_engine()
    results = engine.generate(
        [[1, 2], [3, 4], [5, 6]],
        SamplingParams(max_new_tokens=3),
        in_order=True,
        on_step=lambda info: engine.abort(0) if 0 in engine.open_requests else None,
    )
    assert [result.index for result in results] == [1, 2]


def test_without_a_seed_equal_prompts_go_different_ways_and_the_result_tells_the_seed():
    engine, prompt = small_engine(), [3, 4, 5]
    params = SamplingParams(max_new_tokens=12, temperature=2.0)
    first, second = engine.generate([prompt, prompt], params)
    assert first.sampling.seed != second.sampling.seed and first.tokens != second.tokens
    (again,) = engine.generate([prompt], first.sampling)
    assert again.tokens == first.tokens and params.seed is None


def test_a_model_that_changed_since_the_warmup_is_an_error_and_nothing_is_lost():
    model = tiny_model()
    engine, params = small_engine(model), SamplingParams(max_new_tokens=NEW)
    engine.submit([3, 4, 5], params)
    received = engine.step()
    name = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    with pytest.raises(ModelChanged, match="its attention is 'sdpa'"):
        engine.step()
    model.set_attn_implementation(name)
    while engine.has_work:
        received += engine.step()
    assert [event.token for event in received] == plain_generate(model, [3, 4, 5], NEW)
    assert engine.report().restarts == 0


def test_nothing_of_a_request_is_kept_when_it_was_served():
    engine = small_engine()

    kinds = RequestState, GenerationResult, TokenEvent

    def alive() -> int:
        gc.collect()
        return sum(type(each) in kinds for each in gc.get_objects())

    before = alive()  # what engines of other tests still hold

    for _ in range(3):
        assert sum(1 for _ in engine.generate(_prompts(8), SamplingParams(max_new_tokens=2))) == 8
        engine.submit([1, 2], SamplingParams(max_new_tokens=1))
        assert engine.step()[0].result is not None
        assert engine.step() == [] and alive() <= before


def test_an_unknown_backend_is_refused_before_the_model_is_touched():
    model = tiny_model()
    with pytest.raises(CaptureError, match="unknown backend 'nope'"):
        Engine(model, EngineConfig(backend="nope"))
    assert model.config._attn_implementation == "eager"


def test_blocks_that_somebody_moves_between_two_steps_are_found_where_they_are():
    model, prompts = tiny_model(), _prompts(6)
    engine = small_engine(model, defrag_waste=1)
    moving = OnlineDefragmenter(engine.pool, engine.executor.copies, max_waste=0, min_gap=1)
    requests = [engine.submit(prompt, SamplingParams(max_new_tokens=4 + 9 * (n % 2)))
                for n, prompt in enumerate(prompts)]  # fmt: skip
    tokens: dict[int, list[int]] = {request: [] for request in requests}
    while engine.has_work:
        for event in engine.step():
            tokens[event.request_id].append(event.token)
        moving.defragment()
    assert moving.totals.moves
    for n, (request, prompt) in enumerate(zip(requests, prompts, strict=True)):
        assert tokens[request] == plain_generate(model, prompt, 4 + 9 * (n % 2))
