import pytest

from graphs import (
    Bucket,
    BucketOverflow,
    CaptureError,
    GraphBudgetExceeded,
    StaleGraph,
    no_compile,
)
from tests.graphs.warmup.served import Cache, inputs_of, manager


def test_before_the_warmup_the_error_says_what_to_do():
    served = manager()
    assert served.report is None
    with pytest.raises(CaptureError, match=r"no bucket is captured; call warmup\(\) first"):
        served.bucket(tokens=1)
    with pytest.raises(CaptureError, match=r"no bucket is captured; call warmup\(\) first"):
        served.run(Bucket(tokens=2), *inputs_of(Bucket(tokens=2)))


@pytest.mark.parametrize("overflow", ["error", "split"])
def test_a_need_above_all_buckets_is_the_callers_to_cut(overflow, caplog):
    served = manager(overflow=overflow, strict=False)
    served.warmup()
    with pytest.raises(BucketOverflow, match="need tokens=9 fits no bucket") as caught:
        served.bucket(tokens=9)
    assert caught.value.largest == Bucket(tokens=8)
    assert (served.overflows, served.fallbacks) == (1, 0)
    assert sum(served.hits.values()) == 0


@pytest.mark.parametrize("overflow", ["eager", "compile"])
def test_a_fallback_is_an_error_under_strict(overflow):
    served = manager(overflow=overflow)
    served.warmup()
    with pytest.raises(BucketOverflow, match=f"strict=True forbids overflow='{overflow}'"):
        served.bucket(tokens=9)
    assert served.overflows == 1


def test_an_eager_fallback_runs_the_callable_and_is_counted_and_logged_once(caplog):
    module = Cache()
    served = manager(module=module, overflow="eager", strict=False, backend="aot_eager")
    served.warmup()
    module.sum.zero_()
    for tokens in (9, 9, 12):
        bucket = served.bucket(tokens=tokens)
        result = served.run(bucket, *inputs_of(bucket))
        assert result.shape == (tokens,) and not result.requires_grad
    assert (served.overflows, served.fallbacks) == (3, 3)
    assert module.sum[0].item() == 30
    assert served.hits[Bucket(tokens=9)] == 2
    assert [r.getMessage() for r in caplog.records] == [
        "decode: runs eagerly: a need above the captured buckets: tokens=9; "
        "further ones are counted only"
    ]


def test_a_compile_fallback_captures_once_and_serves_from_then_on(caplog):
    served = manager(overflow="compile", strict=False, backend="aot_eager")
    served.warmup()
    for tokens in (12, 12, 11):
        bucket = served.bucket(tokens=tokens)
        assert bucket == Bucket(tokens=12)
        assert served.run(bucket, *inputs_of(bucket)).tolist() == [3] * 12
    assert (served.overflows, served.fallbacks) == (1, 1)
    assert len(caplog.records) == 1
    with no_compile(), pytest.raises(GraphBudgetExceeded, match=r"capture of decode\[tokens=20\]"):
        served.bucket(tokens=20)
    assert served.bucket(tokens=12) == Bucket(tokens=12)


def test_a_stale_graph_is_an_error_under_strict_and_a_counted_fallback_otherwise(caplog):
    module = Cache()
    strict, lenient = (
        manager(module=module, backend="aot_eager", strict=strict) for strict in (True, False)
    )
    bucket = Bucket(tokens=4)
    for served in (strict, lenient):
        served.warmup()
    module.factor = 5
    module.sum.zero_()
    with pytest.raises(StaleGraph, match=r"decode\[tokens=4\]: no longer holds.*factor"):
        strict.run(bucket, *inputs_of(bucket))
    assert module.sum[0].item() == 0
    for _ in range(2):
        assert lenient.run(bucket, *inputs_of(bucket)).tolist() == [5] * 4
    assert (strict.fallbacks, lenient.fallbacks) == (0, 2)
    assert module.sum[0].item() == 8
    assert len([r for r in caplog.records if r.name.startswith("graphs")]) == 1


def test_a_malformed_need_changes_no_counter():
    served = manager()
    served.warmup()
    for need in ({}, {"rows": 1}, {"tokens": -1}):
        with pytest.raises(ValueError):
            served.bucket(**need)
    assert sum(served.hits.values()) == served.overflows == 0
