import json

import pytest

from graphs import Bucket, BucketEvent, BucketResult, WarmupReport

REPORT = WarmupReport(
    (
        BucketResult(Bucket(n=8), "captured", seconds=2.0, bytes=1 << 20, compiles=1),
        BucketResult(Bucket(n=4), "failed", seconds=0.5, compiles=1, error="graph break"),
        BucketResult(Bucket(n=2), "skipped", error="budget of 2 s is spent"),
    ),
    elapsed_seconds=2.6,
)


def test_the_report_adds_up():
    assert (REPORT.seconds, REPORT.bytes, REPORT.compiles) == (2.5, 1 << 20, 2)


def test_the_text_lists_every_bucket_that_is_not_captured_with_its_reason():
    assert str(REPORT).splitlines() == [
        "1 of 3 buckets captured in 2.6 s, 2 compiles, 1.0 MiB",
        "  n=4: failed: graph break",
        "  n=2: skipped: budget of 2 s is spent",
    ]


def test_the_cost_lists_what_was_measured():
    results = [BucketResult(Bucket(n=n), "captured", run_seconds=n / 4) for n in (8, 2)]
    report = WarmupReport((*results, *REPORT.results), 1.0)
    assert report.cost == ((Bucket(n=8), 2.0), (Bucket(n=2), 0.5))


def test_the_report_is_json():
    data = json.loads(json.dumps(REPORT.to_json()))
    bucket = data["buckets"][1]
    assert (bucket["bucket"], bucket["status"], bucket["error"]) == (
        {"n": 4},
        "failed",
        "graph break",
    )
    assert data["elapsed_seconds"] == 2.6


@pytest.mark.parametrize(
    ("status", "index", "last"),
    [("started", 2, False), ("captured", 1, False), ("failed", 2, True), ("interrupted", 0, True)],
)
def test_the_last_event_is_known_as_such(status, index, last):
    assert BucketEvent(Bucket(n=1), status, index, 3, 0.0).is_last is last
