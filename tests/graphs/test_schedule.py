import pytest

from graphs import Bucket, BucketResult, explicit
from graphs.schedule import Schedule, in_order

SPACE = explicit(["n"], [4, 1, 9])


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("given", [4, 1, 9]),
        ("largest_first", [9, 4, 1]),
        ("smallest_first", [1, 4, 9]),
        (lambda bucket: abs(bucket.n - 4), [4, 1, 9]),
    ],
)
def test_buckets_are_put_in_the_asked_order(order, expected):
    assert [bucket.n for bucket in in_order(SPACE, order)] == expected


def test_largest_is_by_the_cost_of_the_space():
    space = explicit(["a", "b"], [(8, 1), (1, 9)]).with_cost(lambda bucket: bucket.a)
    assert in_order(space, "largest_first")[0] == Bucket(a=8, b=1)


def test_an_unknown_order_is_refused():
    with pytest.raises(ValueError, match="order is 'fastest'; expected 'largest_first'"):
        in_order(SPACE, "fastest")


def test_the_estimate_is_weighted_by_cost():
    schedule = Schedule(in_order(SPACE, "largest_first"), SPACE.cost)
    assert schedule.event(0, "started").eta_seconds is None
    schedule.done(BucketResult(Bucket(n=9), "captured", seconds=18.0))
    assert schedule.event(0, "captured").eta_seconds == pytest.approx(5 * 2.0)
    schedule.done(BucketResult(Bucket(n=4), "failed", seconds=8.0))
    event = schedule.event(1, "failed", error="why")
    assert event.eta_seconds == pytest.approx(1 * 2.0)
    assert (event.bucket, event.index, event.total, event.error) == (Bucket(n=4), 1, 3, "why")


def test_skipped_buckets_do_not_make_the_rest_look_cheap():
    schedule = Schedule(in_order(SPACE, "largest_first"), SPACE.cost)
    schedule.done(BucketResult(Bucket(n=9), "captured", seconds=9.0))
    schedule.done(BucketResult(Bucket(n=4), "skipped"))
    assert schedule.event(1, "skipped").eta_seconds == pytest.approx(1.0)
