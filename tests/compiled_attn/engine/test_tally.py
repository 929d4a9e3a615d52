"""What an engine counts: exact sums, quantiles within 1 %, a size that does not grow."""

from __future__ import annotations

import numpy as np
import pytest

from compiled_attn.engine.tally import BINS, Series, StepRecord, Tally, bin_of, quantile
from graphs import Bucket

SMALL, LARGE = Bucket(tokens=4, requests=2), Bucket(tokens=16, requests=4)


def _tally() -> Tally:
    return Tally([LARGE, SMALL], lambda bucket: 10 * bucket["tokens"] + bucket["requests"])


def _step(bucket: Bucket, seconds: float, tokens: int, **more) -> StepRecord:
    need = {"tokens": tokens, "requests": 2}
    return StepRecord(need, bucket, seconds, uncut_need=more.pop("uncut_need", need), **more)


@pytest.mark.parametrize("seed", range(5))
def test_quantiles_are_within_one_percent(seed):
    rng = np.random.default_rng(seed)
    seconds = np.exp(rng.uniform(np.log(2e-6), np.log(9e4), 5001))
    counts = np.bincount([bin_of(s) for s in seconds], minlength=BINS).astype(float)
    for share in (0.001, 0.5, 0.9, 0.99, 1.0):
        exact = np.sort(seconds)[max(0, int(np.ceil(share * 5001)) - 1)]
        assert quantile(counts, share) == pytest.approx(exact, rel=0.01)


def test_durations_out_of_range_fall_into_the_outermost_bins():
    assert bin_of(0.0) == bin_of(1e-9) == 0 and bin_of(1e9) == BINS - 1
    assert quantile(np.zeros(BINS), 0.5) == 0.0


def test_sums_are_those_of_all_steps_and_of_each_bucket():
    tally = _tally()
    tally.add(_step(SMALL, 0.002, 3, generated_tokens=2, ttft_s=(0.5, 0.25)))
    tally.add(_step(LARGE, 0.03, 12, requests=2, failed_requests=1, nonfinite_rows=1))
    tally.add(_step(SMALL, 0.004, 4, generated_tokens=2, uncut_need={"tokens": 9, "requests": 2}))
    names = ("steps", "requests", "failed_requests", "generated_tokens", "cut_steps")
    assert [tally.count(name) for name in names] == [3, 2, 1, 4, 1]
    assert tally["seconds"] == pytest.approx(0.036) and tally.count("nonfinite_rows") == 1
    assert tally.padding_waste() == {"tokens": round(1 - 19 / 24, 4), "blocks": 0.0}
    steps, waste, times = tally.of_bucket(SMALL)
    assert (steps, times.max) == (2, 4.0)
    assert waste == round(1 - (32 + 42) / 84, 4)
    assert times.p50 == pytest.approx(2, rel=0.01) and tally.step_ms.max == 30.0
    assert (tally.ttft_ms.max, tally.ttft_ms.p50) == (500.0, pytest.approx(250, rel=0.01))


def test_a_bucket_without_steps_has_no_waste():
    assert _tally().of_bucket(LARGE)[:2] == (0, None)


def test_a_long_series_keeps_points_of_its_whole_length():
    series = Series()
    for number in range(100_000):
        series.put(float(number), 2 * number)
    x, y = series.columns()
    assert 512 <= len(x) <= 1024 and x[0] == 0 and x[-1] > 99_000
    assert np.unique(np.diff(x)).size == 1 and y == tuple(2 * n for n in x)
    assert Series().columns() == []
