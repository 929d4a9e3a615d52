"""Async scheduling changes when steps are launched, and no token."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_attn.engine import SamplingParams
from tests.compiled_attn.engine.counting import CountingAhead, warm_engine


def continuation(prompt: list[int], count: int) -> list[int]:
    """What comes after a prompt: numbers up to 99, which ends a text."""
    tokens = list(range(prompt[-1] + 1, prompt[-1] + 1 + count))
    return tokens[: tokens.index(99) + 1] if 99 in tokens else tokens


prompts = st.lists(st.integers(1, 120), min_size=1, max_size=20)
requests = st.tuples(prompts, st.integers(1, 20), st.integers(0, 12), st.none() | st.integers(0, 9))


@settings(deadline=None, max_examples=150)
@given(st.lists(requests, min_size=1, max_size=12))
def test_requests_that_come_and_go_at_any_time_get_the_tokens_of_one_by_one(submitted):
    """Each is a prompt, its new tokens, the step at which it comes, and how many it stays for."""
    executor = CountingAhead()
    engine, received, names = warm_engine(executor), {}, {}
    for step in range(600):
        for name, (prompt, count, start, stays) in enumerate(submitted):
            if step == start:
                names[name] = engine.submit(prompt, SamplingParams(max_new_tokens=count))
            is_dropped = stays is not None and step == start + stays
            if is_dropped and names[name] in engine.open_requests:
                engine.abort(names[name])
        for event in engine.step():
            received.setdefault(event.request_id, []).append(event.token)
            if event.result is not None:
                assert event.result.tokens == received[event.request_id]
        if step > 24 and not engine.has_work:
            break
    assert not engine.has_work and engine.pool.stats().used == 0
    for name, (prompt, count, _, stays) in enumerate(submitted):
        expected, got = continuation(prompt, count), received.get(names[name], [])
        assert got == (expected if stays is None else expected[: len(got)])
    assert executor.most_unread <= 2


def test_a_step_begins_before_the_tokens_of_the_one_before_are_read():
    executor = CountingAhead()
    engine = warm_engine(executor)
    engine.submit([1, 2, 3], SamplingParams(max_new_tokens=5))
    for token in range(4, 9):
        assert [event.token for event in engine.step()] == [token]
        assert executor.unread == (token < 8)  # nothing follows the last one
    assert not engine.has_work and engine.report().steps_ahead == 4


def test_what_is_computed_for_a_finished_request_is_ignored():
    executor = CountingAhead()
    engine = warm_engine(executor)
    first = engine.submit([97], SamplingParams(max_new_tokens=10))
    second = engine.submit([50], SamplingParams(max_new_tokens=10))
    received = [[(event.request_id, event.token) for event in engine.step()] for _ in range(10)]
    assert [token for each in received for name, token in each if name == first] == [98, 99]
    assert [token for each in received for name, token in each if name == second] == [
        *range(51, 61)
    ]
    assert executor.tokens_of and engine.pool.stats().used == 0
    engine.submit([60], SamplingParams(max_new_tokens=3))
    assert [[event.token for event in engine.step()] for _ in range(3)] == [[61], [62], [63]]


def test_a_text_that_ends_alone_leaves_a_step_that_tells_nothing():
    engine = warm_engine(CountingAhead())
    engine.submit([98], SamplingParams(max_new_tokens=10))
    assert [event.token for event in engine.step()] == [99]
    assert not engine.has_work and engine.step() == []
    engine.submit([1], SamplingParams(max_new_tokens=2))
    received = [event.token for _ in range(3) for event in engine.step()]
    assert received == [2, 3] and engine.pool.stats().used == 0


def test_blocks_that_are_scarce_are_given_up_only_when_all_tokens_are_there():
    texts = [[n, 5, n] * (1 + n % 4) for n in range(1, 30)]
    engine = warm_engine(CountingAhead())
    results = engine.generate(texts, SamplingParams(max_new_tokens=20), in_order=True)
    for prompt, result in zip(texts, results, strict=True):
        assert result.tokens == continuation(prompt, 20)
    report = engine.report()
    assert report.preemptions and 0 < report.steps_ahead < report.steps


@pytest.mark.parametrize("where", ["plan", "launch", "_read"])
@pytest.mark.parametrize("at", range(6))
def test_what_was_begun_when_an_exception_came_is_computed_again(monkeypatch, where, at):
    executor = CountingAhead()
    engine, calls = warm_engine(executor), iter(range(100))
    function = getattr(executor, where)

    def failing(*args):
        if next(calls) == at:
            raise KeyboardInterrupt
        return function(*args)

    monkeypatch.setattr(executor, where, failing)
    engine.submit([1, 2, 3], SamplingParams(max_new_tokens=8))
    engine.submit([60], SamplingParams(max_new_tokens=8))
    received: dict[int, list[int]] = {0: [], 1: []}
    with pytest.raises(KeyboardInterrupt):
        while True:
            for event in engine.step():
                received[event.request_id].append(event.token)
    while engine.has_work:
        for event in engine.step():
            received[event.request_id].append(event.token)
    assert received == {0: [*range(4, 12)], 1: [*range(61, 69)]} and engine.restarts == 1
    assert engine.pool.stats().used == 0
