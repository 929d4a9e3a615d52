"""Fixtures of the tests of swaps."""

from __future__ import annotations

from typing import Any

import pytest

from graphs import CapturedGraph


@pytest.fixture
def runs(monkeypatch) -> list[str]:
    """The names of the captured graphs that ran."""
    names: list[str] = []
    run = CapturedGraph.run

    def counted(graph: CapturedGraph, *inputs: Any) -> Any:
        names.append(graph.name)
        return run(graph, *inputs)

    monkeypatch.setattr(CapturedGraph, "run", counted)
    return names
