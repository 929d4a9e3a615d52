"""Warmup and serving: order, progress, budgets, timing."""

import sys

import pytest
import torch

from graphs import Bucket, CaptureError, InputMismatch, ModeMismatch, linear, no_compile
from tests.graphs.warmup.managers import Cache, failing_at, inputs_of, make_manager


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_after_the_warmup_every_need_is_served_without_a_compile(backend):
    module = Cache()
    manager = make_manager(module=module, backend=backend)
    report = manager.warmup()
    assert [result.status for result in report.results] == ["captured"] * 3
    assert report.compiles == (3 if backend == "aot_eager" else 0)
    module.sum.zero_()
    with no_compile() as sentinel:
        for tokens in range(9):
            bucket = manager.bucket(tokens=tokens)
            result = manager.run(bucket, *inputs_of(bucket))
            assert result.tolist() == [3.0] * bucket.tokens
            assert not result.requires_grad
    assert sentinel.events == ()
    assert module.sum[0].item() == 3 * 2 + 2 * 4 + 4 * 8
    assert dict(manager.hits) == {Bucket(tokens=2): 3, Bucket(tokens=4): 2, Bucket(tokens=8): 4}
    assert (manager.overflows, manager.degraded, manager.fallbacks) == (0, 0, 0)


def test_calling_the_manager_picks_and_runs():
    manager = make_manager()
    manager.warmup()
    assert manager({"tokens": 3}, *inputs_of(Bucket(tokens=4))).tolist() == [3] * 4
    assert manager(Bucket(tokens=4), *inputs_of(Bucket(tokens=4))).tolist() == [3] * 4
    assert manager.hits[Bucket(tokens=4)] == 2
    assert manager.never_hit() == [Bucket(tokens=2), Bucket(tokens=8)]


def test_errors_of_a_call_name_the_need_and_the_tensor():
    manager = make_manager(linear(tokens=(1, 8, 64)), backend="aot_eager")
    manager.warmup()
    x, slots = inputs_of(Bucket(tokens=40))
    with pytest.raises(InputMismatch) as caught:
        manager({"tokens": 37}, x, slots.int())
    expected = "need tokens=37: tensor 'slot_mapping' has dtype int32, captured int64"
    assert str(caught.value) == expected
    with pytest.raises(InputMismatch, match=r"decode\[tokens=40\]: tensor 'x' has shape"):
        manager.run(Bucket(tokens=40), *inputs_of(Bucket(tokens=8)))
    with torch.inference_mode(), pytest.raises(ModeMismatch, match="need tokens=37: inference"):
        manager({"tokens": 37}, x, slots)


def test_progress_gets_an_event_when_a_bucket_starts_and_when_it_is_done():
    events = []
    make_manager(make_inputs=failing_at(4)).warmup(events.append)
    assert [(e.bucket.tokens, e.status, e.index, e.total) for e in events] == [
        *[(8, "started", 0, 3), (8, "captured", 0, 3)],
        *[(4, "started", 1, 3), (4, "failed", 1, 3)],
        *[(2, "started", 2, 3), (2, "captured", 2, 3)],
    ]
    assert events[0].eta_seconds is None
    assert events[1].seconds > 0 and events[1].eta_seconds > 0
    assert events[3].error == "RuntimeError: no inputs for tokens=4"
    assert [e.is_last for e in events] == [False] * 5 + [True]


def test_a_spent_budget_lists_what_is_left_and_a_larger_one_captures_all():
    manager = make_manager(budget_seconds=0.0)
    report = manager.warmup()
    assert [r.status for r in report.results] == ["skipped"] * 3
    assert "budget of 0 s is spent" in str(report)
    manager = make_manager(budget_seconds=60.0)
    assert len(manager.warmup().captured) == 3


def test_a_budget_that_runs_out_keeps_the_largest_for_all_needs(monkeypatch):
    manager = make_manager(budget_seconds=5.0)
    monkeypatch.setattr(
        "graphs.warmup.schedule.Schedule.elapsed",
        lambda self: 6.0 if len(self._left) < 3 else 0.0,
    )
    report = manager.warmup()
    assert [r.bucket.tokens for r in report.skipped] == [4, 2]
    assert manager.bucket(tokens=1) == Bucket(tokens=8)
    assert manager.degraded == 1


def test_a_spent_budget_of_bytes_lists_what_is_left(monkeypatch):
    grown = iter(range(0, 1000, 100))
    module = sys.modules["graphs.capture.capture"]
    monkeypatch.setattr(module, "bytes_in_use", lambda devices: next(grown))
    report = make_manager(budget_bytes=150).warmup()
    assert [(r.bucket.tokens, r.status) for r in report.results] == [
        (8, "captured"),
        (4, "captured"),
        (2, "skipped"),
    ]
    assert report.skipped[0].error == "budget of 150 bytes is spent"
    assert report.bytes == 200


def test_each_bucket_is_timed_after_its_capture():
    runs = []
    manager = make_manager(module=lambda x, slots: runs.append(len(x)) or x, timed_runs=2)
    report = manager.warmup()
    assert runs == [8] * 3 + [4] * 3 + [2] * 3
    assert [bucket.tokens for bucket, _ in report.cost] == [8, 4, 2]
    assert all(seconds > 0 for _, seconds in report.cost)
    assert make_manager(timed_runs=0).warmup().cost == ()


def test_the_first_run_of_a_graph_is_no_time_of_it(monkeypatch):
    """It may load or compile something."""
    monkeypatch.setattr(sys.modules["graphs.warmup.capturing"], "_LONG", 0.0)
    runs = []
    make_manager(module=lambda x, slots: runs.append(len(x)) or x).warmup()
    assert runs == [8] * 4 + [4] * 4 + [2] * 4


def test_closing_frees_the_graphs_and_a_warmup_captures_again():
    manager = make_manager(backend="aot_eager")
    manager.warmup()
    manager.close()
    with pytest.raises(CaptureError, match="no bucket is captured"):
        manager.bucket(tokens=1)
    assert len(manager.warmup().captured) == 3
    assert manager.run(Bucket(tokens=2), *inputs_of(Bucket(tokens=2))).tolist() == [3, 3]
