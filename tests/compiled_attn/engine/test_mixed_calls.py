"""Calls in odd orders: from within a step, from its callbacks, to streams that end early."""

from __future__ import annotations

import gc
import math

import numpy as np
import pytest
import torch

from compiled_attn.cache.defrag import DefragTotals
from compiled_attn.engine import ConfigError, Engine, EngineConfig, SamplingParams
from graphs import explicit
from tests.compiled_attn.engine.small import rest_of, small_engine
from tests.compiled_attn.tiny import plain_generate, tiny_model

PROMPTS = [[3, 4, 5], [6, 7], [8, 9, 10, 11]]
PARAMS = SamplingParams(max_new_tokens=5)


def _during_a_step(engine: Engine, call) -> None:
    """Calls once in the middle of the next step, as a signal handler or a finaliser would."""
    run = engine.executor.launch

    def with_call(*args):
        engine.executor.launch = run
        call()
        return run(*args)

    engine.executor.launch = with_call


def test_a_submit_in_the_middle_of_a_step_is_served_and_hurts_nobody():
    engine, late = small_engine(), []
    first = engine.submit(PROMPTS[0], PARAMS)
    _during_a_step(engine, lambda: late.append(engine.submit(PROMPTS[1], PARAMS)))
    received = rest_of(engine)
    assert received[first] == plain_generate(engine.executor.module.model, PROMPTS[0], 5)
    assert received[late[0]] == plain_generate(engine.executor.module.model, PROMPTS[1], 5)
    assert engine.report().restarts == 0


def test_an_abort_in_the_middle_of_a_step_takes_effect_after_it():
    engine = small_engine()
    other, dropped = (engine.submit(prompt, PARAMS) for prompt in PROMPTS[:2])
    engine.step()
    _during_a_step(engine, lambda: engine.abort(dropped))
    assert {event.request_id for event in engine.step()} == {other, dropped}
    received = rest_of(engine)
    assert set(received) == {other} and engine.report().restarts == 0
    assert engine.pool.stats().used == 0


def test_a_step_in_the_middle_of_a_step_is_refused():
    engine = small_engine()
    request = engine.submit(PROMPTS[0], PARAMS)
    _during_a_step(engine, engine.step)
    with pytest.raises(RuntimeError, match="idle engine"):
        engine.step()
    assert rest_of(engine)[request] == plain_generate(engine.executor.module.model, PROMPTS[0], 5)


def test_a_stream_that_is_dropped_in_the_middle_of_a_step_leaves_nothing_behind():
    engine = small_engine()
    streams = [engine.stream(PROMPTS[1:], SamplingParams(max_new_tokens=50))]
    next(streams[0])
    other = engine.submit(PROMPTS[0], PARAMS)
    _during_a_step(engine, lambda: (streams.clear(), gc.collect()))
    received = rest_of(engine)
    assert received == {other: plain_generate(engine.executor.module.model, PROMPTS[0], 5)}
    assert engine.report().restarts == 0 and engine.pool.stats().used == 0
    assert not engine.is_streaming


def test_a_stream_closed_in_its_callback_ends_after_the_step():
    engine = small_engine()
    stream = engine.stream(PROMPTS, PARAMS, on_step=lambda info: stream.close())
    assert len(list(stream)) == 3 and not engine.open_requests
    assert engine.pool.stats().used == 0


def test_events_of_a_step_whose_callback_raises_can_still_be_read():
    engine = small_engine()

    def failing(info):
        raise OSError("the disk is full")

    stream = engine.stream(PROMPTS, SamplingParams(max_new_tokens=1), on_step=failing)
    with pytest.raises(OSError, match="disk"):
        next(stream)
    assert [event.result.finish_reason for event in stream] == ["length"] * 3
    assert engine.report().requests == 3


def test_a_stream_that_was_refused_can_be_read_later():
    engine = small_engine()
    first, second = (engine.stream(PROMPTS, PARAMS) for _ in range(2))
    next(first)
    with pytest.raises(RuntimeError, match="another stream"):
        next(second)
    first.close()
    assert len(list(second)) == 15


def test_what_was_counted_before_an_exception_stays_counted():
    engine = small_engine(num_blocks=24, defrag_waste=0.0)
    prompts = [[*range(1, 14), number] for number in range(20, 26)]
    list(engine.generate(prompts, PARAMS))
    before, moved = engine.memory.stats(), engine.memory.defragmenter.totals
    assert before.hit_tokens and moved != DefragTotals()
    engine.submit(PROMPTS[0], PARAMS)
    _during_a_step(engine, lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    after = engine.memory.stats()
    for name in ("hit_tokens", "queried_tokens", "allocations", "peak_used"):
        assert getattr(after, name) >= getattr(before, name) > 0
    assert engine.memory.defragmenter.totals.calls >= moved.calls > 0 and after.used == 0
    assert engine.report().restarts == 1


def test_a_request_that_a_warmup_lost_the_bucket_for_fails_alone():
    axes = ("tokens", "shared", "unique", "logits")
    buckets = explicit(axes, [(24, 32, 60, 4), (8, 8, 10, 4)])
    sizes = {"max_tokens_per_step": 24, "max_seqs": 4, "block_size": 4, "num_blocks": 61}
    config = EngineConfig(
        **sizes, buckets=buckets, backend="eager", kernel="portable", strict=False
    )
    engine = Engine(tiny_model(), config)
    long, short = engine.submit([1] * 120, PARAMS), engine.submit(PROMPTS[1], PARAMS)
    make = engine.executor.graphs._capturing.make_inputs

    def broken(bucket):
        if bucket["tokens"] == 24:
            raise ValueError("no inputs for this one")
        return make(bucket)

    engine.executor.graphs._capturing.make_inputs = broken
    engine.warmup()
    results = {}
    while engine.has_work:
        results |= {e.request_id: e.result for e in engine.step() if e.result is not None}
    assert results[long].finish_reason == "error" and "bucket" in results[long].error
    assert results[short].tokens == plain_generate(engine.executor.module.model, PROMPTS[1], 5)
    assert engine.report().failed_requests == 1 and engine.report().requests == 2


@pytest.mark.parametrize("arrived", [math.nan, -math.inf, math.inf, "x"])
def test_an_arrival_that_is_no_time_is_refused(arrived):
    engine = small_engine()
    with pytest.raises(ConfigError, match="finite seconds"):
        engine.submit([1], arrived_s=arrived)
    engine.submit([1], PARAMS, arrived_s=-1e6)
    assert len(rest_of(engine)[0]) == 5


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"salt": 7}, "salts, one or one per prompt"),
        ({"salt": "\udc80"}, "salt of text"),
        ({"sampling": 5}, "SamplingParams, one or one per prompt"),
        ({"concurrency": math.nan}, "concurrency"),
        ({"concurrency": "2"}, "concurrency"),
        ({"arrivals": ["a", "b"]}, "arrivals in seconds"),
        ({"arrivals": [math.nan, 0.0]}, "arrivals in seconds"),
        ({"arrivals": 3}, "arrivals, one or one per prompt"),
    ],
)
def test_settings_of_a_workload_of_the_wrong_kind_are_refused(more, message):
    with pytest.raises(ConfigError, match=message):
        small_engine().generate([[1], [2]], **more)


def test_prompts_and_arrivals_may_be_arrays_and_sampling_any_iterable():
    engine = small_engine()
    params = (SamplingParams(max_new_tokens=2) for _ in range(2))
    arrivals = torch.tensor([0.0, 0.01])
    prompts = np.array([[1, 2, 3], [4, 5, 6]])
    assert len(list(engine.generate(prompts, params, arrivals=arrivals))) == 2
    assert len(list(engine.generate(torch.tensor(prompts), arrivals=arrivals.numpy()))) == 2
