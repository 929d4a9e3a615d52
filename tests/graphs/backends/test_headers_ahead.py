"""The headers of C++ kernels: asked for once, beside the trace of the first graph on the CPU."""

from __future__ import annotations

import threading

import pytest
import torch
from torch._inductor.codecache import CppPythonBindingsCodeCache

from graphs import capture
from graphs.backends import headers_ahead as ahead
from graphs.capture.contract import Job

pytestmark = pytest.mark.usefixtures("without_gradients")


@pytest.fixture
def asked(monkeypatch):
    """Kernels that were asked for; the first answers when it is let."""
    made, let = [], threading.Event()

    def load(arguments, source):
        let.wait()
        made.append(source)

    monkeypatch.setattr(CppPythonBindingsCodeCache, "load_pybinding", load)
    monkeypatch.setattr(ahead, "_started", None)
    yield made, let
    let.set()
    ahead.wait_for_headers()


def job(device="cpu"):
    return Job(torch.neg, [torch.ones(2, device=device), 3], name="neg")


def test_they_are_asked_for_once_and_waited_for(asked):
    made, let = asked
    ahead.headers_ahead(job())
    ahead.headers_ahead(job())
    assert not made  # it goes on beside
    let.set()
    ahead.wait_for_headers()
    assert len(made) == 1 and "at::vec" in made[0]


def test_graphs_of_a_device_and_traces_alone_ask_for_none(asked):
    ahead.headers_ahead(job("meta"))
    capture(torch.neg, [torch.ones(2)], backend="aot_eager")
    ahead.wait_for_headers()
    assert ahead._started is None


def test_a_failure_is_left_to_the_compile(asked, monkeypatch):
    def fail(*_):
        raise RuntimeError

    monkeypatch.setattr(CppPythonBindingsCodeCache, "load_pybinding", fail)
    ahead.headers_ahead(job())
    ahead.wait_for_headers()
    assert capture(torch.neg, [torch.ones(2)], backend="aot_eager").run(torch.ones(2)).sum() == -2


def test_a_capture_asks_for_them(asked):
    made, let = asked
    let.set()
    graph = capture(torch.neg, [torch.ones(2)], backend="inductor")
    ahead.wait_for_headers()
    assert graph.run(torch.ones(2)).tolist() == [-1, -1] and len(made) == 1
