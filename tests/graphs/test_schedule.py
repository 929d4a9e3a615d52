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


def test_the_estimate_fits_a_fixed_time_and_one_that_grows_with_cost():
    space = explicit(["n"], [1, 2, 4, 9])
    schedule = Schedule(in_order(space, "largest_first"), space.cost)
    assert schedule.event(0, "started").eta_seconds is None
    schedule.done(BucketResult(Bucket(n=9), "captured", seconds=10.0 + 9))
    assert schedule.event(0, "captured").eta_seconds == pytest.approx(3 * 19.0)
    schedule.done(BucketResult(Bucket(n=4), "failed", seconds=10.0 + 4))
    event = schedule.event(1, "failed", error="why")
    assert event.eta_seconds == pytest.approx(10 + 2 + 10 + 1)
    assert (event.bucket, event.index, event.total, event.error) == (Bucket(n=4), 1, 4, "why")


def test_a_large_bucket_that_is_quick_does_not_make_the_estimate_negative():
    space = explicit(["n"], [1, 4, 9])
    schedule = Schedule(in_order(space, "largest_first"), space.cost)
    schedule.done(BucketResult(Bucket(n=9), "captured", seconds=1.0))
    schedule.done(BucketResult(Bucket(n=4), "captured", seconds=5.0))
    assert schedule.event(1, "captured").eta_seconds == pytest.approx(3.0)


def test_skipped_buckets_do_not_make_the_rest_look_cheap():
    schedule = Schedule(in_order(SPACE, "largest_first"), SPACE.cost)
    schedule.done(BucketResult(Bucket(n=9), "captured", seconds=9.0))
    schedule.done(BucketResult(Bucket(n=4), "skipped"))
    assert schedule.event(1, "skipped").eta_seconds == pytest.approx(9.0)
