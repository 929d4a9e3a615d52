"""Failed, interrupted and killed captures, and what a later warmup makes of them."""

import os
import signal

import pytest
from torch import nn

from graphs import Bucket, CaptureError, GraphBudgetExceeded, no_compile
from tests.graphs.warmup.managers import failing_at, inputs_of, make_manager


def test_a_failed_bucket_is_reported_and_its_needs_go_to_the_next_larger(caplog):
    manager = make_manager(make_inputs=failing_at(4))
    report = manager.warmup()
    assert [r.bucket.tokens for r in report.failed] == [4]
    assert report.failed[0].error == "RuntimeError: no inputs for tokens=4"
    assert "decode[tokens=4]: capture failed: RuntimeError" in caplog.text
    caplog.clear()
    assert [manager.bucket(tokens=t).tokens for t in (1, 3, 4, 5)] == [2, 8, 8, 8]
    assert manager.degraded == 2
    assert [r.getMessage() for r in caplog.records] == [
        "decode: decode[tokens=4] is failed: RuntimeError: no inputs for tokens=4; "
        "its needs go to tokens=8; further ones are counted only"
    ]
    assert manager.never_hit() == []
    with pytest.raises(CaptureError, match=r"decode\[tokens=4\]: failed: RuntimeError"):
        manager.run(Bucket(tokens=4), *inputs_of(Bucket(tokens=4)))


def test_a_graph_break_in_the_module_fails_each_bucket_with_the_users_line():
    def broken(x, slots):
        print("hello")
        return x

    manager = make_manager(module=broken, backend="aot_eager")
    with pytest.raises(CaptureError, match="graph break, expected one full graph"):
        manager.warmup()
    report = manager.report
    assert len(report.failed) == 3
    line = broken.__code__.co_firstlineno + 1
    assert f"graph break, expected one full graph: {__file__}:{line}" in report.failed[0].error
    with pytest.raises(CaptureError, match=r"0 of 3 captured; first cause, of decode.*graph break"):
        manager.bucket(tokens=1)


def test_a_failed_bucket_is_tried_again_by_the_next_warmup():
    broken = {8}
    manager = make_manager(make_inputs=lambda b: failing_at(*broken)(b))
    assert len(manager.warmup().failed) == 1
    broken.clear()
    events = []
    report = manager.warmup(events.append)
    assert [e.bucket.tokens for e in events] == [8, 8]
    assert len(report.captured) == 3 and not report.failed
    assert manager.bucket(tokens=7) == Bucket(tokens=8)


def test_a_graph_that_runs_only_once_is_a_failed_bucket():
    def once(x, slots, seen=[]):  # noqa: B006
        if len(x) in seen:
            raise RuntimeError("a second time")
        seen.append(len(x))
        return x

    manager = make_manager(module=once)
    with pytest.raises(CaptureError, match="a second time"):
        manager.warmup()
    assert manager.report.failed[0].error == "RuntimeError: a second time"
    with pytest.raises(CaptureError, match="0 of 3 captured"):
        manager.bucket(tokens=1)


def test_a_warmup_of_nothing_but_failures_raises_with_the_first_cause():
    manager = make_manager(make_inputs=failing_at(2, 4, 8))
    cause = r"decode: 0 of 3 captured; first cause, of decode\[tokens=8\]: RuntimeError: no inputs"
    with pytest.raises(CaptureError, match=cause):
        manager.warmup()
    assert len(manager.report.failed) == 3
    with pytest.raises(CaptureError, match=cause + r".*call warmup\(\) again"):
        manager.bucket(tokens=1)
    with pytest.raises(CaptureError, match=cause):
        manager.run(Bucket(tokens=8), *inputs_of(Bucket(tokens=8)))


def test_a_second_process_does_last_what_failed_in_the_first(tmp_path):
    journal = tmp_path / "warmup.jsonl"
    make_manager(make_inputs=failing_at(8), journal=journal).warmup()
    events = []
    report = make_manager(journal=journal).warmup(events.append)
    assert [e.bucket.tokens for e in events if e.status == "captured"] == [4, 2, 8]
    assert [result.bucket.tokens for result in report.results] == [8, 4, 2]
    assert events[0].eta_seconds is None  # the failed one was not measured
    events.clear()
    make_manager(journal=journal).warmup(events.append)
    assert [e.bucket.tokens for e in events if e.status == "captured"] == [8, 4, 2]
    assert events[0].eta_seconds > 0


def test_a_process_killed_in_a_capture_leaves_a_journal_that_says_where(tmp_path):
    journal = tmp_path / "warmup.jsonl"
    pid = os.fork()
    if not pid:
        try:
            make_manager(module=Killed(), journal=journal).warmup()
        finally:
            os._exit(0)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    events = []
    make_manager(journal=journal).warmup(events.append)
    assert [e.bucket.tokens for e in events if e.status == "captured"] == [8, 2, 4]


class Killed(nn.Module):
    """Kills its process in its second bucket."""

    def forward(self, x, slot_mapping):
        if x.shape[0] == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return x


class Interrupted(nn.Module):
    """Gets a real Ctrl-C in its second bucket."""

    def __init__(self):
        super().__init__()
        self.armed = True

    def forward(self, x, slot_mapping):
        if self.armed and x.shape[0] == 4:
            signal.raise_signal(signal.SIGINT)
        return x


@pytest.fixture
def interruptible():
    """Ctrl-C raises, also where a shell that started this in the background has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interruption_keeps_what_was_captured_and_can_be_resumed():
    module, events = Interrupted(), []
    manager = make_manager(module=module)
    with pytest.raises(KeyboardInterrupt):
        manager.warmup(events.append)
    assert [e.status for e in events] == ["started", "captured", "started", "interrupted"]
    assert events[-1].is_last and events[-1].error == "KeyboardInterrupt"
    assert [r.bucket.tokens for r in manager.report.results] == [8]
    assert manager.bucket(tokens=1) == Bucket(tokens=8)
    module.armed = False
    assert len(manager.warmup().captured) == 3
    assert manager.bucket(tokens=1) == Bucket(tokens=2)


def test_a_warmup_under_an_armed_sentinel_is_refused():
    manager = make_manager()
    with no_compile(), pytest.raises(GraphBudgetExceeded, match=r"capture of decode\[tokens=8\]"):
        manager.warmup()
    assert len(manager.warmup().captured) == 3
