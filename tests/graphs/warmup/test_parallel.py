import pytest
import torch

from graphs import Bucket, GraphBudgetExceeded, WarmupManager, explicit, no_compile
from graphs.backends.eager import EagerBackend
from graphs.backends.inductor import InductorBackend
from graphs.warmup.parallel import NoWorkers, precompiler, shared, stored
from graphs.warmup.workers import why_no_workers

SPACE = explicit(["n"], [4, 2, 1])


def rows_of(bucket):
    return [torch.ones(bucket.n)]


def double(x):
    return x * 2


def refusal(backend, **options):
    with pytest.raises(NoWorkers) as caught:
        precompiler(double, rows_of, backend, str, options)
    return str(caught.value)


def test_a_backend_that_keeps_nothing_needs_no_workers():
    assert refusal("eager") == "backend 'eager' keeps nothing on disk"
    assert refusal("aot_eager") == "backend 'aot_eager' keeps nothing on disk"
    assert "unknown backend 'no'" in refusal("no")


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
    report = manager.warmup()
    assert len(report.failed) == 3
    assert "no compiler here" in report.failed[0].error
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

    def has(self, function, inputs):
        if len(inputs[0]) == 1:
            raise OSError("a store that is gone")
        return len(inputs[0]) <= 2

    def why_no_precompile(self):
        return "nothing to compile with"

    def precompile(self, *_, **__):
        raise AssertionError


def test_what_a_store_has_comes_first_and_needs_no_workers(caplog):
    parts = (double, rows_of, Stored(), {})
    assert stored([*SPACE], *parts) == [Bucket(n=2)]
    assert stored([*SPACE], double, rows_of, "inductor", {}) == []
    order = []
    manager = WarmupManager(double, SPACE, rows_of, backend=Stored(), workers=2)
    manager.warmup(lambda event: order.append(event.bucket.n) if event.seconds else None)
    assert order == [2, 4, 1]
    assert "workers=2 compile nothing: nothing to compile with" in caplog.text
    caplog.clear()
    WarmupManager(double, explicit(["n"], [2]), rows_of, backend=Stored(), workers=2).warmup()
    assert not caplog.records


@pytest.mark.skipif(bool(why_no_workers()), reason="no fork")
def test_all_buckets_come_once_whatever_the_workers_do():
    def fail(bucket):
        raise RuntimeError

    assert sorted(b.n for b in shared([*SPACE], 2, fail)) == [1, 2, 4]
    assert [*shared([*SPACE], 0, fail)] == [Bucket(n=4), Bucket(n=2), Bucket(n=1)]
