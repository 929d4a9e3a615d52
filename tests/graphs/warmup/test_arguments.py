"""Wrong arguments of a warmup manager."""

import pytest
import torch

from graphs import Bucket, CaptureError, WarmupManager
from tests.graphs.warmup.managers import SPACE, Cache, inputs_of, make_manager


def test_buckets_that_are_no_space_are_refused():
    with pytest.raises(TypeError, match=r"buckets: expected a BucketSpace, got \[1, 2\]"):
        WarmupManager(Cache(), [1, 2], inputs_of, backend="eager")


def test_an_unknown_option_is_refused_before_anything_is_captured():
    expected = r"unknown option 'colour'; expected the options of backend 'inductor' \(.*mode"
    with pytest.raises(TypeError, match=expected):
        make_manager(backend="inductor", colour="red")
    with pytest.raises(TypeError, match=r"unknown option 'mode'.*backend 'eager'"):
        make_manager(mode="reduce-overhead")


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (torch.ones(2), r"got a Tensor: a single input is written \(x,\)"),
        (iter([torch.ones(2)]), "got a list_iterator: pass them in the order"),
        (None, "got a NoneType"),
    ],
)
def test_inputs_that_are_no_tuple_list_or_dict_end_the_warmup_at_once(wrong, text):
    calls = []
    manager = make_manager(make_inputs=lambda bucket: calls.append(bucket) or wrong)
    with pytest.raises(
        TypeError, match=r"make_inputs\(tokens=8\): expected a tuple, list or dict.*" + text
    ):
        manager.warmup()
    assert calls == [Bucket(tokens=8)]
    assert manager.report is None


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"overflow": "ignore"}, "overflow is 'ignore'; expected one of"),
        ({"order": "random"}, "order is 'random'"),
        ({"budget_seconds": -1}, "budget_seconds is -1"),
        ({"budget_bytes": -1}, "budget_bytes is -1"),
        ({"timed_runs": -1}, "timed_runs is -1"),
        ({"order": "most_used"}, "usage is not given"),
    ],
)
def test_a_wrong_setting_is_refused_at_once(options, text):
    with pytest.raises(ValueError, match=text):
        make_manager(**options)


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
