import pytest
import torch

from graphs import Bucket, WarmupManager, explicit
from graphs.warmup.group import WarmupGroup


def rows_of(bucket):
    return [torch.ones(bucket.tokens)]


def pairs_of(bucket):
    return [torch.ones(bucket.pairs, 2)]


def group_of_two():
    group = WarmupGroup()
    group.add("step", lambda x: x + 1, explicit(["tokens"], [2, 4]), rows_of, backend="eager")
    group.add("swap", lambda x: x * 2, explicit(["pairs"], [8]), pairs_of, backend="eager")
    return group


def test_one_warmup_captures_all_and_reports_each_under_its_name():
    group = group_of_two()
    assert group.report is None
    report = group.warmup()
    assert [(r.name, str(r.bucket), r.status) for r in report.results] == [
        ("step", "tokens=4", "captured"),
        ("step", "tokens=2", "captured"),
        ("swap", "pairs=8", "captured"),
    ]
    assert group["step"]({"tokens": 1}, torch.ones(2)).tolist() == [2, 2]
    assert group["swap"]({"pairs": 3}, *pairs_of(Bucket(pairs=8))).sum() == 32
    assert [*group] == ["step", "swap"]


def test_progress_counts_through_all_callables_and_ends_once():
    events = []
    group_of_two().warmup(events.append)
    assert [(e.name, e.index, e.total) for e in events if e.status == "captured"] == [
        ("step", 0, 3),
        ("step", 1, 3),
        ("swap", 2, 3),
    ]
    assert [event.is_last for event in events] == [False] * 5 + [True]


def test_a_second_warmup_has_only_what_is_left_to_do():
    group = group_of_two()
    group["step"].warmup()
    events = []
    group.warmup(events.append)
    assert [(e.name, e.index, e.total) for e in events] == [("swap", 0, 1)] * 2
    group.close()
    assert group.warmup(events.append).results[0].status == "captured"
    assert len(events) == 8


def test_a_manager_that_exists_can_take_part_once():
    group = group_of_two()
    manager = WarmupManager(abs, explicit(["n"], [1]), rows_of, backend="eager", name="step")
    with pytest.raises(ValueError, match="name 'step' is taken; expected another than step, swap"):
        group.take(manager)
    with pytest.raises(ValueError, match="taken"):
        group.add("swap", abs, explicit(["n"], [1]), rows_of)
    manager.name = "sampler"
    group.take(manager)
    assert group["sampler"] is manager


def test_a_wrong_setting_adds_nothing():
    group = group_of_two()
    with pytest.raises(ValueError, match="workers is 0"):
        group.add("sampler", abs, explicit(["n"], [1]), rows_of, workers=0)
    assert "sampler" not in group and len(group) == 2
