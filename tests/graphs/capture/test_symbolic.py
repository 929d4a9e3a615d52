"""What captures share: the graph that is there where it runs, or else one of fixed sizes."""

from __future__ import annotations

import pytest
import torch

from graphs.capture.frozen import Frozen
from graphs.capture.symbolic import SymbolicSizes
from graphs.errors import CaptureError


def _doubles(x):
    return x * 2


def _fails_on_four(x):
    if len(x) == 4:
        raise RuntimeError("inputs share memory")
    return x * 2


def _captured(symbolic, run, size, alone=_doubles):
    make, alone = Frozen(run, is_loaded=True), Frozen(alone)
    return symbolic.capture("net", [torch.ones(size)], 1, lambda: make, lambda: alone)


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

    with pytest.raises(CaptureError, match="a graph break"):
        symbolic.capture("net", [torch.ones(4)], 1, lambda: None, alone)
