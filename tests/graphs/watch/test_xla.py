"""XLA's counters behind the sentinel's interface, on a stub that counts as `torch_xla` does."""

from __future__ import annotations

import logging

import pytest

from graphs import GraphBudgetExceeded, no_xla_compile


class Metrics:
    """`torch_xla.debug.metrics`, as far as it is asked."""

    def __init__(self) -> None:
        self.samples = 0

    def metric_data(self, name):
        assert name == "CompileTime"
        return (self.samples, self.samples * 2.5e9, ()) if self.samples else None


@pytest.fixture
def metrics():
    return Metrics()


def test_nothing_compiled_is_nothing_said(metrics):
    metrics.samples = 3
    with no_xla_compile(metrics=metrics) as sentinel:
        pass
    assert sentinel.compiles == 0 and sentinel.events == ()


def test_a_late_compile_is_an_error_that_names_the_counter_and_the_seconds(metrics):
    with (
        pytest.raises(GraphBudgetExceeded, match=r"2 XLA graphs.*CompileTime rose by 2, 5\.00 s"),
        no_xla_compile(metrics=metrics),
    ):
        metrics.samples += 2


def test_not_strict_it_counts_and_warns(metrics, caplog):
    with caplog.at_level(logging.WARNING), no_xla_compile(strict=False, metrics=metrics) as seen:
        metrics.samples += 1
        seen.check()
        seen.check()
        metrics.samples += 1
    assert seen.compiles == 2 and len(seen.events) == 2
    assert caplog.text.count("after warmup: compile of 1 XLA graph") == 2
    assert "warmup" in seen.events[0].remedy


def test_what_compiles_after_the_metrics_were_cleared_counts_whole(metrics):
    metrics.samples = 5
    with no_xla_compile(strict=False, metrics=metrics) as seen:
        metrics.samples = 1
    assert seen.compiles == 1


def test_an_exception_of_the_body_is_not_covered_by_one_about_compiles(metrics):
    with pytest.raises(KeyError), no_xla_compile(metrics=metrics) as seen:
        metrics.samples += 1
        raise KeyError("body")
    seen.check()
    assert seen.compiles == 0, "it is disarmed"


def test_without_torch_xla_arming_says_what_is_missing():
    pytest.importorskip("torch")
    try:
        import torch_xla  # noqa: F401
    except ImportError:
        with pytest.raises(ModuleNotFoundError, match="torch_xla"):
            no_xla_compile().arm()
    else:
        pytest.skip("torch_xla is installed")


@pytest.mark.parametrize("data", [{"samples": 1}, (), 7, ("many", 1.0)])
def test_counters_of_another_form_are_one_line_that_says_what_was_expected(metrics, data):
    metrics.metric_data = lambda name: data
    with pytest.raises(ValueError, match=r"expected \(samples, nanoseconds, \.\.\.\)") as caught:
        no_xla_compile(metrics=metrics).arm()
    assert "\n" not in str(caught.value)
