"""What captures share: the graph that is there where it runs, or else one of fixed sizes."""

from __future__ import annotations

import pytest
import torch

from graphs.capture.contract import Frozen
from graphs.capture.symbolic import SharedGraph, SymbolicSizes
from graphs.errors import CaptureError

HOW = {"name": "net", "warm_runs": 1}


def _doubles(x):
    return x * 2


def _fails_on_four(x):
    if len(x) == 4:
        raise RuntimeError("inputs share memory")
    return x * 2


def _captured(symbolic, run, size, alone=_doubles):
    frozen = Frozen(run, is_loaded=True)
    graph = SharedGraph(lambda _: "", lambda _: frozen)
    examples = [torch.ones(size)]
    return symbolic.capture(examples, lambda: (graph, frozen), lambda: Frozen(alone), **HOW)


def test_where_the_shared_graph_fails_the_capture_is_alone_and_says_why(caplog):
    symbolic = SymbolicSizes("net[n]", [(0,)])
    assert _captured(symbolic, _fails_on_four, 8).shared_as == "net[n]"
    alone = _captured(symbolic, _fails_on_four, 4)
    assert not alone.is_loaded and not alone.shared_as
    assert alone.why_alone == "net[n] fails on its inputs: RuntimeError: inputs share memory"
    assert f"net: compiled at fixed sizes: {alone.why_alone}" in caplog.text
    assert _captured(symbolic, _fails_on_four, 6).shared_as == "net[n]"


def test_what_fails_in_either_way_is_an_error_of_the_capture():
    symbolic = SymbolicSizes("net[n]", [(0,)])
    _captured(symbolic, _fails_on_four, 8)

    def alone():
        raise CaptureError("net", "a graph break")

    examples = [torch.ones(4)]
    with pytest.raises(CaptureError, match="a graph break"):
        symbolic.capture(examples, lambda: None, alone, **HOW)
