import threading
import time
from types import SimpleNamespace

import pytest
import torch

from graphs import (
    Bucket,
    CaptureError,
    GraphBudgetExceeded,
    WarmupManager,
    explicit,
    no_compile,
)
from graphs.backends.eager import EagerBackend
from graphs.backends.inductor import InductorBackend
from graphs.warmup.workers import why_no_workers

SPACE = explicit(["n"], [4, 2, 1])


def rows_of(bucket):
    return [torch.ones(bucket.n)]


def double(x):
    return x * 2


def capturing(backend, workers=2):
    return WarmupManager(double, SPACE, rows_of, backend=backend, workers=workers)._capturing


def refusal(backend):
    return capturing(backend)._prepare_workers()


def test_a_backend_that_keeps_nothing_needs_no_workers(caplog):
    assert refusal("eager") == "backend 'eager' keeps nothing on disk"
    assert refusal("aot_eager") == "backend 'aot_eager' keeps nothing on disk"
    assert [*capturing("eager").capture_order([*SPACE])] == [*SPACE]
    assert "workers=2 compile nothing: backend 'eager' keeps nothing on disk" in caplog.text


def test_without_inductors_cache_workers_are_of_no_use(monkeypatch):
    monkeypatch.setattr(InductorBackend, "available", lambda self: None)
    with torch._inductor.config.patch(fx_graph_cache=False):
        assert "switched off (fx_graph_cache)" in refusal("inductor")
    with torch._inductor.config.patch(force_disable_caches=True):
        assert "switched off" in refusal("inductor")


def test_a_backend_that_cannot_even_begin_leaves_each_bucket_to_tell_why(monkeypatch, caplog):
    monkeypatch.setattr(InductorBackend, "available", lambda self: None)
    manager = WarmupManager(double, SPACE, rows_of, workers=2)
    monkeypatch.setattr(InductorBackend, "available", lambda self: "no compiler here")
    with pytest.raises(CaptureError, match="no compiler here"):
        manager.warmup()
    assert len(manager.report.failed) == 3
    assert "no compiler here" in manager.report.failed[0].error
    assert "workers=2 compile nothing: backend 'inductor' is not available" in caplog.text


def test_under_an_armed_sentinel_nothing_is_prepared(monkeypatch):
    if why_no_workers():
        pytest.skip(why_no_workers())
    monkeypatch.setattr(InductorBackend, "available", lambda self: None)
    manager = WarmupManager(double, SPACE, rows_of, workers=2)
    with no_compile(), pytest.raises(GraphBudgetExceeded):
        manager.warmup()


class Stored(EagerBackend):
    """Has the graphs of two rows and less, and compiles others beforehand."""

    def has(self, job):
        if len(job.examples[0]) == 1:
            raise OSError("a store that is gone")
        return len(job.examples[0]) <= 2

    def why_no_precompile(self):
        return "nothing to compile with"

    def precompile(self, *_, **__):
        raise AssertionError


def test_what_a_store_has_comes_first_and_needs_no_workers(caplog):
    assert capturing(Stored())._not_stored([*SPACE]) == [Bucket(n=4), Bucket(n=1)]
    assert capturing("eager")._not_stored([*SPACE]) == [*SPACE]
    order = []
    manager = WarmupManager(double, SPACE, rows_of, backend=Stored(), workers=2)
    manager.warmup(lambda event: order.append(event.bucket.n) if event.seconds else None)
    assert order == [2, 4, 1]
    assert "workers=2 compile nothing: nothing to compile with" in caplog.text
    caplog.clear()
    WarmupManager(double, explicit(["n"], [2]), rows_of, backend=Stored(), workers=2).warmup()
    assert not caplog.records


class Compiling(EagerBackend):
    """Compiles beforehand, so it says."""

    def why_no_precompile(self):
        return ""

    def precompile(self, *_, **__):
        return None


class Elsewhere(threading.Thread):
    """Of a package that shows progress."""

    __module__ = "tqdm._monitor"


@pytest.mark.skipif(bool(why_no_workers()), reason="no fork")
def test_a_group_follows_its_representative_and_what_failed_comes_last(tmp_path):
    space = explicit(["n"], [16, 8, 4, 2, 1])
    double = Compiling()
    double.why_no_symbolic = lambda: ""

    def order(failed):
        manager = WarmupManager(torch.neg, space, rows_of, backend=double, workers=2, symbolic="n")
        capturing = manager._capturing
        capturing.journal = SimpleNamespace(previously_failed=[Bucket(n=failed)] if failed else [])
        todo = capturing.previously_failed_last([*manager._order])
        return [bucket.n for bucket in capturing.capture_order(todo)]

    assert order(None) == [16, 8, 4, 2, 1]
    assert order(1) == [16, 8, 4, 2, 1]  # compiled by nobody else
    assert order(4) == [16, 8, 2, 1, 4]


@pytest.mark.skipif(bool(why_no_workers()), reason="no fork")
@pytest.mark.parametrize("workers", [2, 3])
def test_all_buckets_come_once_whatever_the_workers_do(workers):
    class Failing(EagerBackend):
        def why_no_precompile(self):
            return ""

        def precompile(self, *_, **__):
            raise RuntimeError

    found = [*capturing(Failing(), workers).capture_order([*SPACE])]
    assert sorted(bucket.n for bucket in found) == [1, 2, 4]


@pytest.mark.skipif(bool(why_no_workers()), reason="no fork")
def test_a_worker_is_not_waited_for_beyond_the_budget(monkeypatch, tmp_path):
    in_hand = tmp_path / "in hand"

    class Hanging(Compiling):
        def precompile(self, *_, **__):
            in_hand.touch()
            time.sleep(600)

        def capture(self, *arguments, **options):  # before the worker began, this would take all
            end = time.monotonic() + 120
            while not in_hand.exists() and time.monotonic() < end:
                time.sleep(0.02)
            return super().capture(*arguments, **options)

    monkeypatch.setattr("graphs.warmup.workers._PATIENCE", 500.0)  # it alone ends no wait
    budget = {"budget_seconds": 5.0, "workers": 2}
    report = WarmupManager(torch.neg, SPACE, rows_of, backend=Hanging(), **budget).warmup()
    assert in_hand.exists() and report.captured and report.skipped and report.seconds < 200
