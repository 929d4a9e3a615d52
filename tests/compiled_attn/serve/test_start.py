"""The start of a server: `/health` reports the warmup, and an error ends the server."""

from __future__ import annotations

import json
import threading

import openai
import pytest

from compiled_attn.errors import ConfigError, ModelError
from compiled_attn.serve.model import ServedModel
from compiled_attn.serve.server import listen, run
from compiled_attn.text import LLM
from tests.compiled_attn.serve.conftest import CONFIG, NAME, running


def test_health_counts_the_graphs_until_the_warmup_is_done(chat_dir):
    go_on, stages = threading.Event(), []

    def load(on_bucket):
        def each(event):
            on_bucket(event)
            stages.append(server.get("/health"))
            if event.index == 1:
                go_on.wait(30)

        return LLM(chat_dir, CONFIG, progress=each)

    with running(load) as server:
        while not any("1 of" in text for _, text in stages):
            assert server.model.error is None, server.model.error
        with pytest.raises(openai.InternalServerError, match="warming up, 1 of") as raised:
            server.client.completions.create(model=NAME, prompt="x", max_tokens=2)
        assert raised.value.status_code == 503
        metrics = server.get("/metrics")[1].splitlines()
        assert 'compiled_attn_ready{model_name="tiny"} 0.0' in metrics
        go_on.set()
        server.wait()
        assert server.get("/health") == (200, '{"status":"ready"}')
        assert server.client.completions.create(model=NAME, prompt="x", max_tokens=2).choices
    assert all(status == 503 for status, _ in stages)
    assert "of" in json.loads(stages[-1][1])["status"]


def test_what_ends_the_start_ends_the_server():
    def load(on_bucket):
        raise ModelError("no such weights")

    with pytest.raises(ModelError, match="no such weights"):
        run(ServedModel(NAME, load), listen("127.0.0.1", 0), lambda: None)


def test_a_port_in_use_is_refused_with_the_remedy():
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen at 127.0.0.1:{port}: .*--port"):
            listen("127.0.0.1", port)


def test_a_start_ends_after_the_graph_that_is_being_captured():
    at_a_graph, go_on = threading.Event(), threading.Event()

    def load(on_bucket):
        at_a_graph.set()
        assert go_on.wait(60)
        on_bucket(None)
        raise AssertionError("it went on")

    model = ServedModel(NAME, load)
    assert model.cancel_start(0)  # not begun
    model = ServedModel(NAME, load)
    model.start(lambda: None)
    assert at_a_graph.wait(60)
    assert not model.cancel_start(0.05)
    go_on.set()
    assert model.cancel_start(60)
    assert not isinstance(model.error, AssertionError)
