"""When the writes of a stream happen, and the times between tokens that they report."""

from __future__ import annotations

import asyncio
import time
from itertools import count
from unittest.mock import AsyncMock, Mock

import pytest

from compiled_attn.engine import GenerationResult, SamplingParams, TokenEvent
from compiled_attn.serve.endpoint import Endpoint


@pytest.mark.parametrize(
    ("running", "milliseconds"), [(0, 0), (4, 1), (64, 16), (80, 20), (1000, 20)]
)
def test_a_stream_pauses_for_the_requests_that_run_and_never_long(running, milliseconds):
    endpoint = Mock()
    endpoint._model.open_requests = 1000  # most of them wait
    endpoint._model.running_requests = running
    assert Endpoint._pause_s(endpoint) == pytest.approx(milliseconds / 1000)


def observed(monkeypatch, batches: list[int], *, error: str = "") -> list[tuple[float, int]]:
    """The gaps of a stream whose writes have these counts of tokens, one write a second."""
    tokens = sum(batches) - bool(error)
    result = GenerationResult(
        0, [1], [1] * tokens, "length", 0.5, 0.5 + 0.1 * (tokens - 1), SamplingParams(), 0, error
    )
    given = [[TokenEvent(0, 1)] * size for size in batches]
    given[-1][-1] = TokenEvent(0, None if error else 1, result)
    clock, gaps = count(), []
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    handle = Mock(read=AsyncMock(side_effect=[*given, []]))
    events = Mock(**{f"{name}.return_value": "" for name in ("start", "put", "finish")})
    writer = Mock(**{f"{name}.return_value": "" for name in ("start", "finish")})
    endpoint = Mock(_events=lambda *_: events, _pause_s=lambda: 0.0)
    endpoint._metrics.observe_gaps = lambda *gap: gaps.append(gap)

    async def read() -> None:
        async for _ in Endpoint._stream_answer(endpoint, None, handle, writer):
            pass

    if error:
        with pytest.raises(RuntimeError, match=error):
            asyncio.run(read())
    else:
        asyncio.run(read())
    return gaps


@pytest.mark.parametrize(
    ("batches", "gaps"),
    [
        ([1, 1, 1], [(1.0, 1), (1.0, 1)]),
        ([1, 4], [(0.25, 4)]),
        ([3, 4, 1], [(0.25, 6), (1.0, 1)]),  # those of the first write with those of the second
        ([5], [(pytest.approx(0.1), 4)]),  # as the engine timed them
        ([1], []),
    ],
)
def test_the_gaps_of_tokens_that_are_written_together_are_never_zero(monkeypatch, batches, gaps):
    assert observed(monkeypatch, batches) == gaps


@pytest.mark.parametrize(
    ("batches", "gaps"), [([1, 3], [(0.5, 2)]), ([3, 1], []), ([1], []), ([2, 1, 1], [(1.0, 2)])]
)
def test_an_error_is_no_token(monkeypatch, batches, gaps):
    assert observed(monkeypatch, batches, error="torn") == gaps
