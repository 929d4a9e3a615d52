import torch

from graphs import Bucket, WarmupGroup, WarmupManager, explicit


def rows_of(bucket):
    return [torch.ones(bucket.tokens)]


def pairs_of(bucket):
    return [torch.ones(bucket.pairs, 2)]


def two_managers():
    tokens, pairs = explicit(["tokens"], [2, 4]), explicit(["pairs"], [8])
    return (
        WarmupManager(lambda x: x + 1, tokens, rows_of, backend="eager", name="step"),
        WarmupManager(lambda x: x * 2, pairs, pairs_of, backend="eager", name="swap"),
    )


def test_one_warmup_captures_all_and_reports_each_under_its_name():
    step, swap = two_managers()
    report = WarmupGroup(step, swap).warmup()
    assert [(r.name, str(r.bucket), r.status) for r in report.results] == [
        ("step", "tokens=4", "captured"),
        ("step", "tokens=2", "captured"),
        ("swap", "pairs=8", "captured"),
    ]
    assert step({"tokens": 1}, torch.ones(2)).tolist() == [2, 2]
    assert swap({"pairs": 3}, *pairs_of(Bucket(pairs=8))).sum() == 32


def test_progress_counts_through_all_members_and_ends_once():
    events = []
    WarmupGroup(*two_managers()).warmup(events.append)
    assert [(e.name, e.index, e.total) for e in events if e.status == "captured"] == [
        ("step", 0, 3),
        ("step", 1, 3),
        ("swap", 2, 3),
    ]
    assert [event.is_last for event in events] == [False] * 5 + [True]


def test_a_second_warmup_has_only_what_is_left_to_do():
    step, swap = two_managers()
    group, events = WarmupGroup(step, swap), []
    step.warmup()
    assert group.pending == 1
    group.warmup(events.append)
    assert [(e.name, e.index, e.total) for e in events] == [("swap", 0, 1)] * 2
    step.close()
    assert group.warmup(events.append).results[0].status == "captured"
    assert group.pending == 0 and len(events) == 6


def test_a_group_is_a_member_of_another_and_the_last_with_work_to_do_tells_the_time_left():
    step, swap = two_managers()
    done = WarmupManager(abs, explicit(["tokens"], [1]), rows_of, backend="eager", name="done")
    done.warmup()
    events = []
    report = WarmupGroup(WarmupGroup(step), WarmupGroup(swap, done)).warmup(events.append)
    assert [result.name for result in report.results] == ["step", "step", "swap", "done"]
    has_eta = [event.eta_seconds is not None for event in events]
    assert has_eta == [False] * 5 + [True] and events[-1].is_last
