"""When the writes of a stream happen."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from compiled_attn.serve.endpoint import Endpoint


@pytest.mark.parametrize(
    ("running", "milliseconds"), [(0, 0), (4, 1), (64, 16), (80, 20), (1000, 20)]
)
def test_a_stream_pauses_for_the_requests_that_run_and_never_long(running, milliseconds):
    endpoint = Mock()
    endpoint._model.open_requests = 1000  # most of them wait
    endpoint._model.llm.engine.scheduler.running = [None] * running
    assert Endpoint._pause_s(endpoint) == pytest.approx(milliseconds / 1000)
