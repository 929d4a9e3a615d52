import sys
from types import ModuleType, SimpleNamespace

import pytest

from graphs import CompileWatch, GraphBudgetExceeded, no_compile


class Metrics(ModuleType):
    """The public part of `torch_xla.debug.metrics`, and of Gaudi's metrics."""

    compiled = uncached = graphs = None

    def metric_data(self, name):
        assert name == "CompileTime"
        return None if self.compiled is None else (self.compiled, 1.5e9, [])

    def counter_value(self, name):
        assert name == "UncachedCompile"
        return self.uncached

    def metric_global(self, name):
        assert name == "graph_compilation"
        return SimpleNamespace(stats=lambda: [("TotalNumber", self.graphs), ("TotalTime", 7)])


def imported(monkeypatch, name):
    parts = name.split(".")
    for end in range(1, len(parts)):
        package = ".".join(parts[:end])
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    metrics = Metrics(name)
    monkeypatch.setitem(sys.modules, name, metrics)
    return metrics


@pytest.fixture
def xla(monkeypatch):
    return imported(monkeypatch, "torch_xla.debug.metrics")


def test_graphs_that_xla_compiles_are_counted_from_the_start_to_the_end(xla):
    xla.compiled, xla.uncached = 5, 4
    with CompileWatch() as watch:
        assert watch.device_compiles == 0
        xla.compiled, xla.uncached = 7, 6
        assert watch.device_compiles == 2
        xla.compiled = 8
    xla.compiled = 20
    assert (watch.device_compiles, watch.compiles) == (3, 0)
    assert {(e.kind, e.function) for e in watch.events} == {("device compile", "a graph by XLA")}


def test_without_a_metric_the_counter_counts_and_none_is_zero(xla):
    with CompileWatch() as watch:
        assert watch.device_compiles == 0
        xla.uncached = 3
    assert watch.device_compiles == 3


def test_a_counter_that_is_cleared_counts_on(xla):
    xla.compiled = 9
    with CompileWatch() as watch:
        xla.compiled = 2
    assert watch.device_compiles == 2


def test_a_bridge_that_is_imported_later_counts_from_zero(monkeypatch):
    with CompileWatch() as watch:
        imported(monkeypatch, "torch_xla.debug.metrics").compiled = 4
    assert watch.device_compiles == 4


def test_gaudis_counter_counts_its_graphs(monkeypatch):
    metrics = imported(monkeypatch, "habana_frameworks.torch.hpu.metrics")
    metrics.graphs = 10
    with CompileWatch() as watch:
        metrics.graphs = 12
    assert [event.function for event in watch.events] == ["a graph by Gaudi"] * 2


def test_a_counter_that_cannot_be_read_is_logged_once(xla, monkeypatch, caplog):
    def fail(name):
        raise RuntimeError("no device")

    monkeypatch.setattr(xla, "metric_data", fail)
    with caplog.at_level("WARNING", "graphs"), CompileWatch() as watch:
        assert watch.events == watch.events == ()
    assert caplog.messages == ["compiles of XLA cannot be counted: no device"]


def test_a_strict_sentinel_raises_at_a_check_and_at_the_end(xla):
    xla.compiled = 0
    sentinel = no_compile().arm()
    sentinel.check()
    xla.compiled = 1
    assert sentinel.device_compiles == 1  # looking is no check
    with pytest.raises(GraphBudgetExceeded, match="device compile of a graph by XLA"):
        sentinel.check()
    sentinel.check()
    xla.compiled = 2
    with pytest.raises(GraphBudgetExceeded):
        sentinel.disarm()
    sentinel.disarm()
    assert sentinel.device_compiles == 2


def test_the_error_at_the_end_does_not_replace_that_of_the_body(xla):
    xla.compiled = 0
    with pytest.raises(ZeroDivisionError), no_compile():
        xla.compiled = 1
        _ = 1 / 0
    with pytest.raises(GraphBudgetExceeded), no_compile():
        xla.compiled = 2
