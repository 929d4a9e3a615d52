import os
import signal
import sys

import pytest
import torch
from torch import nn

from graphs import (
    Bucket,
    CaptureError,
    GraphBudgetExceeded,
    InputMismatch,
    ModeMismatch,
    WarmupManager,
    explicit,
    linear,
    no_compile,
)
from tests.graphs.warmup.served import SPACE, Cache, failing_at, inputs_of, manager


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_after_the_warmup_every_need_is_served_without_a_compile(backend):
    module = Cache()
    served = manager(module=module, backend=backend)
    report = served.warmup()
    assert [result.status for result in report.results] == ["captured"] * 3
    assert report.compiles == (3 if backend == "aot_eager" else 0)
    module.sum.zero_()
    with no_compile() as sentinel:
        for tokens in range(9):
            bucket = served.bucket(tokens=tokens)
            result = served.run(bucket, *inputs_of(bucket))
            assert result.tolist() == [3.0] * bucket.tokens
            assert not result.requires_grad
    assert sentinel.events == ()
    assert module.sum[0].item() == 3 * 2 + 2 * 4 + 4 * 8
    assert dict(served.hits) == {Bucket(tokens=2): 3, Bucket(tokens=4): 2, Bucket(tokens=8): 4}
    assert (served.overflows, served.degraded, served.fallbacks) == (0, 0, 0)


def test_calling_the_manager_picks_and_runs():
    served = manager()
    served.warmup()
    assert served({"tokens": 3}, *inputs_of(Bucket(tokens=4))).tolist() == [3] * 4
    assert served(Bucket(tokens=4), *inputs_of(Bucket(tokens=4))).tolist() == [3] * 4
    assert served.hits[Bucket(tokens=4)] == 2
    assert served.never_hit() == [Bucket(tokens=2), Bucket(tokens=8)]


def test_errors_of_a_call_name_the_need_and_the_tensor():
    served = manager(linear(tokens=(1, 8, 64)), backend="aot_eager")
    served.warmup()
    x, slots = inputs_of(Bucket(tokens=40))
    with pytest.raises(InputMismatch) as caught:
        served({"tokens": 37}, x, slots.int())
    expected = "need tokens=37: tensor 'slot_mapping' has dtype int32, captured int64"
    assert str(caught.value) == expected
    with pytest.raises(InputMismatch, match=r"decode\[tokens=40\]: tensor 'x' has shape"):
        served.run(Bucket(tokens=40), *inputs_of(Bucket(tokens=8)))
    with torch.inference_mode(), pytest.raises(ModeMismatch, match="need tokens=37: inference"):
        served({"tokens": 37}, x, slots)


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("largest_first", [8, 4, 2]),
        ("smallest_first", [2, 4, 8]),
        ("given", [4, 2, 8]),
        (lambda bucket: -bucket.tokens % 8, [8, 4, 2]),
    ],
)
def test_buckets_are_captured_in_the_asked_order(order, expected):
    seen = []

    def make_inputs(bucket):
        seen.append(bucket.tokens)
        return inputs_of(bucket)

    space = explicit(["tokens"], [4, 2, 8])
    report = manager(space, make_inputs=make_inputs, order=order).warmup()
    assert seen == expected
    assert [result.bucket.tokens for result in report.results] == expected


def test_progress_hears_of_every_bucket_when_it_starts_and_ends():
    events = []
    manager(make_inputs=failing_at(4)).warmup(events.append)
    assert [(e.bucket.tokens, e.status, e.index, e.total) for e in events] == [
        *[(8, "started", 0, 3), (8, "captured", 0, 3)],
        *[(4, "started", 1, 3), (4, "failed", 1, 3)],
        *[(2, "started", 2, 3), (2, "captured", 2, 3)],
    ]
    assert events[0].eta_seconds is None
    assert events[1].seconds > 0 and events[1].eta_seconds > 0
    assert events[3].error == "RuntimeError: no inputs for tokens=4"
    assert [e.is_last for e in events] == [False] * 5 + [True]


def test_a_failed_bucket_is_reported_and_its_needs_go_to_the_next_larger(caplog):
    served = manager(make_inputs=failing_at(4))
    report = served.warmup()
    assert [r.bucket.tokens for r in report.failed] == [4]
    assert report.failed[0].error == "RuntimeError: no inputs for tokens=4"
    assert "decode[tokens=4]: capture failed: RuntimeError" in caplog.text
    caplog.clear()
    assert [served.bucket(tokens=t).tokens for t in (1, 3, 4, 5)] == [2, 8, 8, 8]
    assert served.degraded == 2
    assert [r.getMessage() for r in caplog.records] == [
        "decode: decode[tokens=4] is failed: RuntimeError: no inputs for tokens=4; "
        "its needs go to tokens=8; further ones are counted only"
    ]
    assert served.never_hit() == []
    with pytest.raises(CaptureError, match=r"decode\[tokens=4\]: failed: RuntimeError"):
        served.run(Bucket(tokens=4), *inputs_of(Bucket(tokens=4)))


def test_a_graph_break_in_the_module_fails_each_bucket_with_the_users_line():
    def broken(x, slots):
        print("hello")
        return x

    served = manager(module=broken, backend="aot_eager")
    with pytest.raises(CaptureError, match="graph break, expected one full graph"):
        served.warmup()
    report = served.report
    assert len(report.failed) == 3
    line = broken.__code__.co_firstlineno + 1
    assert f"graph break, expected one full graph: {__file__}:{line}" in report.failed[0].error
    with pytest.raises(CaptureError, match=r"0 of 3 captured; first cause, of decode.*graph break"):
        served.bucket(tokens=1)


def test_a_failed_bucket_is_tried_again_by_the_next_warmup():
    broken = {8}
    served = manager(make_inputs=lambda b: failing_at(*broken)(b))
    assert len(served.warmup().failed) == 1
    broken.clear()
    events = []
    report = served.warmup(events.append)
    assert [e.bucket.tokens for e in events] == [8, 8]
    assert len(report.captured) == 3 and not report.failed
    assert served.bucket(tokens=7) == Bucket(tokens=8)


def test_a_spent_budget_lists_what_is_left_and_a_later_warmup_goes_on():
    served = manager(budget_seconds=0.0)
    report = served.warmup()
    assert [r.status for r in report.results] == ["skipped"] * 3
    assert "budget of 0 s is spent" in str(report)
    served = manager(budget_seconds=60.0)
    assert len(served.warmup().captured) == 3


def test_a_budget_that_runs_out_keeps_the_largest_for_all_needs(monkeypatch):
    served = manager(budget_seconds=5.0)
    times = iter([0.0, 6.0, 7.0])
    monkeypatch.setattr("graphs.warmup.schedule.Schedule.elapsed", lambda self: next(times, 8.0))
    original = served._capturing.attempt
    monkeypatch.setattr(
        served._capturing,
        "attempt",
        lambda b, elapsed, size: original(b, 0.0 if b.tokens == 8 else 6.0, size),
    )
    report = served.warmup()
    assert [r.bucket.tokens for r in report.skipped] == [4, 2]
    assert served.bucket(tokens=1) == Bucket(tokens=8)
    assert served.degraded == 1


def test_a_spent_budget_of_bytes_lists_what_is_left(monkeypatch):
    grown = iter(range(0, 1000, 100))
    module = sys.modules["graphs.capture.capture"]
    monkeypatch.setattr(module, "bytes_in_use", lambda devices: next(grown))
    report = manager(budget_bytes=150).warmup()
    assert [(r.bucket.tokens, r.status) for r in report.results] == [
        (8, "captured"),
        (4, "captured"),
        (2, "skipped"),
    ]
    assert report.skipped[0].error == "budget of 150 bytes is spent"
    assert report.bytes == 200


def test_the_most_used_come_right_after_the_largest():
    report = manager(order="most_used", usage={Bucket(tokens=1): 7}).warmup()
    assert [result.bucket.tokens for result in report.results] == [8, 2, 4]


def test_each_bucket_is_timed_after_its_capture():
    runs = []
    served = manager(module=lambda x, slots: runs.append(len(x)) or x, timed_runs=2)
    report = served.warmup()
    assert runs == [8] * 3 + [4] * 3 + [2] * 3
    assert [bucket.tokens for bucket, _ in report.cost] == [8, 4, 2]
    assert all(seconds > 0 for _, seconds in report.cost)
    assert manager(timed_runs=0).warmup().cost == ()


def test_the_first_run_of_a_graph_is_no_time_of_it(monkeypatch):
    """It may load or compile something."""
    monkeypatch.setattr(sys.modules["graphs.warmup.capturing"], "_LONG", 0.0)
    runs = []
    manager(module=lambda x, slots: runs.append(len(x)) or x).warmup()
    assert runs == [8] * 4 + [4] * 4 + [2] * 4


def test_a_graph_that_runs_only_once_is_a_failed_bucket():
    def once(x, slots, seen=[]):  # noqa: B006
        if len(x) in seen:
            raise RuntimeError("a second time")
        seen.append(len(x))
        return x

    served = manager(module=once)
    with pytest.raises(CaptureError, match="a second time"):
        served.warmup()
    assert served.report.failed[0].error == "RuntimeError: a second time"
    with pytest.raises(CaptureError, match="0 of 3 captured"):
        served.bucket(tokens=1)


def test_results_and_events_bear_the_name_of_the_callable():
    events = []
    report = manager().warmup(events.append)
    assert {event.name for event in events} == {"decode"}
    assert {result.name for result in report.results} == {"decode"}


def test_a_second_process_does_last_what_failed_in_the_first(tmp_path):
    journal = tmp_path / "warmup.jsonl"
    manager(make_inputs=failing_at(8), journal=journal).warmup()
    events = []
    report = manager(journal=journal).warmup(events.append)
    assert [e.bucket.tokens for e in events if e.status == "captured"] == [4, 2, 8]
    assert [result.bucket.tokens for result in report.results] == [8, 4, 2]
    assert events[0].eta_seconds is None  # nobody knows how long the failed one takes
    events.clear()
    manager(journal=journal).warmup(events.append)
    assert [e.bucket.tokens for e in events if e.status == "captured"] == [8, 4, 2]
    assert events[0].eta_seconds > 0


def test_a_process_killed_in_a_capture_leaves_a_journal_that_says_where(tmp_path):
    journal = tmp_path / "warmup.jsonl"
    pid = os.fork()
    if not pid:
        try:
            manager(module=Killed(), journal=journal).warmup()
        finally:
            os._exit(0)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    events = []
    manager(journal=journal).warmup(events.append)
    assert [e.bucket.tokens for e in events if e.status == "captured"] == [8, 2, 4]


class Killed(nn.Module):
    """Kills its process in its second bucket."""

    def forward(self, x, slot_mapping):
        if x.shape[0] == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return x


def test_a_budget_keeps_what_the_journal_knows_of_the_skipped(tmp_path):
    journal = tmp_path / "warmup.jsonl"
    manager(journal=journal).warmup()
    before = journal.read_text()
    manager(journal=journal, budget_seconds=0.0).warmup()
    events = []
    manager(journal=journal).warmup(events.append)
    assert "captured" in before and events[0].eta_seconds > 0


def test_workers_where_the_backend_keeps_nothing_are_not_started_and_the_log_says_so(caplog):
    served = manager(workers=2)
    assert len(served.warmup().captured) == 3
    assert "workers=2 compile nothing: backend 'eager' keeps nothing on disk" in caplog.text


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
    served = manager(module=module)
    with pytest.raises(KeyboardInterrupt):
        served.warmup(events.append)
    assert [e.status for e in events] == ["started", "captured", "started", "interrupted"]
    assert events[-1].is_last and events[-1].error == "KeyboardInterrupt"
    assert [r.bucket.tokens for r in served.report.results] == [8]
    assert served.bucket(tokens=1) == Bucket(tokens=8)
    module.armed = False
    assert len(served.warmup().captured) == 3
    assert served.bucket(tokens=1) == Bucket(tokens=2)


def test_a_warmup_under_an_armed_sentinel_is_refused():
    served = manager()
    with no_compile(), pytest.raises(GraphBudgetExceeded, match=r"capture of decode\[tokens=8\]"):
        served.warmup()
    assert len(served.warmup().captured) == 3


def test_closing_frees_the_graphs_and_a_warmup_captures_again():
    served = manager(backend="aot_eager")
    served.warmup()
    served.close()
    with pytest.raises(CaptureError, match="no bucket is captured"):
        served.bucket(tokens=1)
    assert len(served.warmup().captured) == 3
    assert served.run(Bucket(tokens=2), *inputs_of(Bucket(tokens=2))).tolist() == [3, 3]


def test_buckets_that_are_no_space_are_refused():
    with pytest.raises(TypeError, match=r"buckets: expected a BucketSpace, got \[1, 2\]"):
        WarmupManager(Cache(), [1, 2], inputs_of, backend="eager")


def test_an_unknown_option_is_refused_before_anything_is_captured():
    expected = r"unknown option 'colour'; expected the options of backend 'inductor' \(.*mode"
    with pytest.raises(TypeError, match=expected):
        manager(backend="inductor", colour="red")
    with pytest.raises(TypeError, match=r"unknown option 'mode'.*backend 'eager'"):
        manager(mode="reduce-overhead")


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"x": torch.ones(2)}, "got a dict: pass its values in the order"),
        (torch.ones(2), r"got a Tensor: a single input is written \(x,\)"),
        (iter([torch.ones(2)]), "got a list_iterator: return them in the order"),
        (None, "got a NoneType"),
    ],
)
def test_inputs_that_are_no_tuple_or_list_end_the_warmup_at_once(wrong, text):
    asked = []
    served = manager(make_inputs=lambda bucket: asked.append(bucket) or wrong)
    with pytest.raises(
        TypeError, match=r"make_inputs\(tokens=8\): expected a tuple or list.*" + text
    ):
        served.warmup()
    assert asked == [Bucket(tokens=8)]
    assert served.report is None


def test_a_warmup_of_nothing_but_failures_raises_with_the_first_cause():
    served = manager(make_inputs=failing_at(2, 4, 8))
    cause = r"decode: 0 of 3 captured; first cause, of decode\[tokens=8\]: RuntimeError: no inputs"
    with pytest.raises(CaptureError, match=cause):
        served.warmup()
    assert len(served.report.failed) == 3
    with pytest.raises(CaptureError, match=cause + r".*call warmup\(\) again"):
        served.bucket(tokens=1)
    with pytest.raises(CaptureError, match=cause):
        served.run(Bucket(tokens=8), *inputs_of(Bucket(tokens=8)))


def test_a_warmup_without_a_budget_captures_nothing_and_is_no_failure():
    assert len(manager(budget_seconds=0.0).warmup().skipped) == 3


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"overflow": "ignore"}, "overflow is 'ignore'; expected one of"),
        ({"order": "random"}, "order is 'random'"),
        ({"budget_seconds": -1}, "budget_seconds is -1"),
        ({"budget_bytes": -1}, "budget_bytes is -1"),
        ({"workers": 0}, "workers is 0; expected at least 1"),
        ({"timed_runs": -1}, "timed_runs is -1"),
        ({"order": "most_used"}, "usage is not given"),
    ],
)
def test_a_wrong_setting_is_refused_at_once(options, text):
    with pytest.raises(ValueError, match=text):
        manager(**options)


@pytest.mark.parametrize(
    ("backend", "reason"),
    [("inducter", "unknown backend 'inducter'; expected one of eager, "), ("hpu", "not available")],
)
def test_a_backend_that_there_is_not_is_one_error_when_the_manager_is_made(
    backend, reason, caplog, tmp_path
):
    journal = tmp_path / "journal"
    with pytest.raises(CaptureError, match=reason):
        WarmupManager(Cache(), SPACE, lambda _: (), backend=backend, journal=journal)
    assert not caplog.messages and not journal.exists()
