"""A stream that is dropped aborts its requests, whatever drops it, and raises nothing."""

from __future__ import annotations

import gc
import sys

import pytest

from compiled_attn.engine import Engine, SamplingParams
from tests.compiled_attn.engine.counting import LONG, used, warm_engine

PROMPTS = [[3, 4, 5], [40], [60, 61]]


@pytest.fixture
def unraisable(monkeypatch) -> list[BaseException]:
    """The exceptions that finalisers raise, which python only prints."""
    seen: list[BaseException] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda each: seen.append(each.exc_value))
    return seen


def begun(engine: Engine, kind: str):
    """What serves several requests, and has begun."""
    if kind == "generate":
        results = engine.generate(PROMPTS, [SamplingParams(max_new_tokens=1), LONG, LONG])
        next(results)
        return results
    sampling = SamplingParams(max_new_tokens=30, n=2) if kind == "continuations" else LONG
    stream = engine.stream(PROMPTS, sampling)
    for _ in range(4):
        next(stream)
    return stream


@pytest.mark.parametrize("way", ["dropped", "collected in a cycle", "closed"])
@pytest.mark.parametrize("kind", ["stream", "generate", "continuations"])
def test_a_dropped_stream_of_several_requests_frees_their_blocks(kind, way, unraisable):
    engine = warm_engine()
    stream = begun(engine, kind)
    assert len(engine.open_requests) >= 2 and used(engine)
    if way == "closed":
        stream.close()
    elif way == "collected in a cycle":
        cycle = [stream]
        cycle.append(cycle)
        del cycle
    del stream
    gc.collect()
    assert not unraisable
    assert not engine.open_requests and not used(engine)
    assert [each.tokens for each in engine.generate([[7]], SamplingParams(max_new_tokens=2))] == [
        [8, 9]
    ]


def test_a_stream_dropped_while_another_is_aborted_is_aborted_once(unraisable, monkeypatch):
    engine = warm_engine()
    streams = [begun(engine, "stream")]
    other = engine.submit([20], LONG)
    finish = engine.scheduler.finish

    def finishing(sequence, **options):
        finish(sequence, **options)
        streams.clear()
        gc.collect()

    monkeypatch.setattr(engine.scheduler, "finish", finishing)
    engine.abort(other)
    engine.step()
    assert not unraisable and not engine.open_requests and not used(engine)
