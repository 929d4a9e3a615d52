"""Models whose layers all have a sliding window: blocks before it are given back while they run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from compiled_attn.engine import ConfigError, Engine, EngineConfig, SamplingParams
from compiled_attn.engine.cache_size import CacheSize
from compiled_attn.engine.local import LocalExecutor
from tests.compiled_attn.engine.counting import LONG, Counting, CountingAhead, used, warm_engine
from tests.compiled_attn.engine.small import SIZES, greedy, plain, prompts_of, small_engine
from tests.compiled_attn.tiny import tiny_model

WINDOW = 9  # of the tiny model
LAYOUTS = ["native", "portable"]


def _tokens(count: int, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(1, 128, count).tolist()


def _engine(**config: Any) -> Engine:
    return small_engine(tiny_model("mistral"), **{"max_graphs": 2, **config})


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return plain(tiny_model("mistral"), prompts_of(6, longest=100), 12)


@pytest.mark.parametrize(("kernel", "sanitize"), [("native", True), ("portable", False)])
def test_a_request_longer_than_the_cache_runs(kernel, sanitize):
    engine, prompt = _engine(num_blocks=12, kernel=kernel, sanitize=sanitize), _tokens(150)
    assert greedy(engine, [prompt], 30) == plain(tiny_model("mistral"), [prompt], 30)
    stats = engine.memory.stats()
    assert stats.peak_used <= engine.sizing.most_blocks(180) == 10
    assert stats.preemptions == 0 and used(engine) == 0


@pytest.mark.parametrize(
    ("kernel", "config"),
    [
        ("native", {"num_blocks": 14, "sanitize": True}),
        ("native", {"num_blocks": 26, "defrag_waste": 0.0}),
        ("portable", {"num_blocks": 26, "defrag_waste": 0.0, "sanitize": True}),
    ],
)
def test_tokens_are_those_of_the_model_when_requests_compete(kernel, config, expected):
    engine = _engine(kernel=kernel, **config)
    assert greedy(engine, prompts_of(6, longest=100), 12) == expected
    assert used(engine) == 0


def test_preempted_requests_are_continued():
    engine, prompts = _engine(num_blocks=11), [_tokens(3, seed) for seed in range(4)]
    assert greedy(engine, prompts, 20) == plain(tiny_model("mistral"), prompts, 20)
    assert engine.memory.stats().preemptions > 0 and used(engine) == 0


def test_without_a_window_all_blocks_are_held_and_the_tokens_are_the_same(expected):
    executor = LocalExecutor(
        tiny_model("mistral"), EngineConfig(**{**SIZES, "max_graphs": 1, "num_blocks": 120})
    )
    executor.sizing = replace(executor.sizing, window=None)
    engines = [Engine(executor), _engine(num_blocks=120)]
    engines[0].warmup()
    for engine in engines:
        assert greedy(engine, prompts_of(6, longest=100), 12) == expected
    all_held, released = (engine.memory.stats().peak_used for engine in engines)
    assert released < 0.7 * all_held


@pytest.mark.parametrize("kernel", LAYOUTS)
def test_what_null_and_free_blocks_hold_does_not_matter(kernel, expected):
    """A masked NaN would make a row NaN: a weight of 0 does not hide it."""
    engine, results = _engine(num_blocks=30, kernel=kernel), {}
    for prompt in prompts_of(6, longest=100):
        engine.submit(prompt, SamplingParams(max_new_tokens=12))
    while engine.has_work:
        for buffer in engine.executor.cache.buffers():
            blocks = buffer.unflatten(0, (30, -1))
            blocks[np.flatnonzero(engine.pool.free_mask())] = float("nan")
            blocks[0] = float("nan")
        for event in engine.step():
            if event.result is not None:
                results[event.request_id] = event.result.tokens
    assert [results[index] for index in range(6)] == expected


def test_a_prompt_shares_the_last_window_of_another():
    engine, prompt = _engine(num_blocks=26), _tokens(80)
    model, params = tiny_model("mistral"), SamplingParams(max_new_tokens=4)
    (first,) = engine.generate([prompt], params)
    assert engine.memory.stats().cached == 20  # all of the prompt
    other = [*prompt[:62], *_tokens(20, seed=2)]
    (second,) = engine.generate([other], params)
    assert [[first.tokens], [second.tokens]] == [
        plain(model, [each], 4) for each in (prompt, other)
    ]
    assert (first.cached_tokens, second.cached_tokens) == (0, 60)


def test_an_aborted_request_leaves_no_block():
    engine = _engine(num_blocks=30)
    ids = [engine.submit(_tokens(90, seed), SamplingParams(max_new_tokens=9)) for seed in (1, 2)]
    for _ in range(6):
        engine.step()
    assert engine.pool.table(ids[0]).num_released > 0
    engine.abort(ids[0])
    engine._rollback()  # the other is computed again
    while engine.has_work:
        engine.step()
    assert used(engine) == 0


def test_a_cache_that_cannot_hold_a_window_and_a_step_is_refused():
    engine = _engine(num_blocks=10)
    engine.check(_tokens(20), SamplingParams(max_new_tokens=16))
    with pytest.raises(
        ConfigError, match=r"10 blocks of 4\), got 9 .* num_blocks to at least 11, or lower"
    ):
        engine.check(_tokens(100), SamplingParams(max_new_tokens=4))


def test_by_default_the_cache_is_for_windows_and_not_for_contexts():
    config = EngineConfig(block_size=4, max_seqs=2, max_tokens_per_step=24)
    sizes = [CacheSize.of(tiny_model(each), config, 256, step=24) for each in ("llama", "mistral")]
    assert [size.blocks for size in sizes] == [1 + 2 * 64, 1 + 2 * 10]


@pytest.mark.parametrize("family", ["gemma3_text", "llama"])
def test_a_model_with_a_layer_that_sees_everything_gives_nothing_back(family):
    engine = small_engine(tiny_model(family), max_graphs=1)
    assert engine.sizing.window is engine.pool.window is None
    assert engine.sizing.most_blocks(100) == 25


class _Windowed(Counting):
    window = 7


class _WindowedAhead(CountingAhead):
    window = 7


@pytest.mark.parametrize("executor", [_Windowed, _WindowedAhead])
def test_a_step_in_flight_finds_what_it_sees(executor):
    """The executor looks for each token that a step sees."""
    engine = warm_engine(executor())
    ids = [engine.submit([start], LONG) for start in (100, 120, 140)]
    longest = 0
    while engine.has_work:
        engine.step()
        held = [engine.pool.table(each) for each in ids if each in engine.pool]
        longest = max([longest, *(len(each.blocks) - each.num_released for each in held)])
    assert longest <= 4 and used(engine) == 0
    assert engine.report().steps_ahead > 0 or executor is _Windowed
