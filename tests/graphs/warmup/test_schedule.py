import pytest

from graphs import Bucket, BucketResult, explicit, linear
from graphs.warmup.schedule import Schedule, in_order

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


def test_most_used_counts_the_needs_that_go_to_each_bucket_after_the_largest():
    usage = {Bucket(n=2): 5, Bucket(n=3): 5, Bucket(n=1): 9, Bucket(n=99): 1000}
    assert [b.n for b in in_order(SPACE, "most_used", usage)] == [9, 4, 1]
    usage[Bucket(n=0)] = 2
    assert [b.n for b in in_order(SPACE, "most_used", usage)] == [9, 1, 4]


def test_buckets_of_no_use_come_in_the_order_of_their_cost():
    space = linear(n=(1, 1, 4))
    assert [b.n for b in in_order(space, "most_used", {Bucket(n=3): 1})] == [4, 3, 1, 2]


def test_most_used_and_a_usage_come_together():
    with pytest.raises(ValueError, match="order is 'most_used' and usage is not given"):
        in_order(SPACE, "most_used")
    with pytest.raises(ValueError, match="order is 'given' and usage is given"):
        in_order(SPACE, "given", {Bucket(n=1): 1})


def test_what_an_earlier_warmup_measured_is_the_estimate_from_the_start():
    measured = {Bucket(n=4): 8.0, Bucket(n=1): 2.0, Bucket(n=9): 20.0}
    schedule = Schedule([*SPACE], measured)
    event = schedule.event(Bucket(n=4), 0, "started")
    assert event.eta_seconds == pytest.approx(30.0)
    schedule.done(BucketResult(Bucket(n=4), "captured", seconds=2.0))
    event = schedule.event(Bucket(n=4), 0, "captured")
    assert event.eta_seconds == pytest.approx((2.0 + 20.0) / 4)


def test_unmeasured_buckets_are_estimated_by_the_mean_of_the_done_ones():
    schedule = Schedule([*SPACE], {Bucket(n=4): 8.0})
    assert schedule.event(Bucket(n=4), 0, "started").eta_seconds is None
    schedule.done(BucketResult(Bucket(n=4), "captured", seconds=8.0))
    assert schedule.event(Bucket(n=4), 0, "captured").eta_seconds == pytest.approx(2 * 8.0)
    schedule.done(BucketResult(Bucket(n=1), "failed", seconds=2.0))
    event = schedule.event(Bucket(n=1), 1, "failed", error="why")
    assert event.eta_seconds == pytest.approx(5.0)
    assert (event.bucket, event.index, event.total, event.error) == (Bucket(n=1), 1, 3, "why")


def test_shared_captures_have_an_estimate_of_their_own():
    buckets = [Bucket(n=n) for n in (9, 8, 4, 1)]
    schedule = Schedule(buckets, group_key=lambda bucket: Bucket(n=min(bucket.n, 2)))
    schedule.done(BucketResult(Bucket(n=9), "captured", seconds=9.0))
    assert schedule.event(Bucket(n=9), 0, "captured").eta_seconds == pytest.approx(9.0)
    schedule.done(BucketResult(Bucket(n=8), "captured", seconds=0.5))
    assert schedule.event(Bucket(n=8), 1, "captured").eta_seconds == pytest.approx(9.5)


def test_skipped_buckets_do_not_make_the_rest_look_cheap():
    schedule = Schedule(in_order(SPACE, "largest_first"))
    schedule.done(BucketResult(Bucket(n=9), "captured", seconds=9.0))
    schedule.done(BucketResult(Bucket(n=4), "skipped"))
    assert schedule.event(schedule.buckets[1], 1, "skipped").eta_seconds == pytest.approx(9.0)
