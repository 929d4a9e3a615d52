import pytest

from graphs import (
    Bucket,
    BucketOverflow,
    CaptureError,
    GraphBudgetExceeded,
    StaleGraph,
    no_compile,
)
from tests.graphs.warmup.managers import Cache, inputs_of, make_manager


def test_before_the_warmup_the_error_says_what_to_do():
    manager = make_manager()
    assert manager.report is None
    with pytest.raises(CaptureError, match=r"no bucket is captured; call warmup\(\) first"):
        manager.bucket(tokens=1)
    with pytest.raises(CaptureError, match=r"no bucket is captured; call warmup\(\) first"):
        manager.run(Bucket(tokens=2), *inputs_of(Bucket(tokens=2)))


@pytest.mark.parametrize("overflow", ["error", "split"])
def test_a_need_above_all_buckets_is_the_callers_to_cut(overflow, caplog):
    manager = make_manager(overflow=overflow, strict=False)
    manager.warmup()
    with pytest.raises(BucketOverflow, match="need tokens=9 fits no bucket") as caught:
        manager.bucket(tokens=9)
    assert caught.value.largest == Bucket(tokens=8)
    assert (manager.overflows, manager.fallbacks) == (1, 0)
    assert sum(manager.hits.values()) == 0


@pytest.mark.parametrize("overflow", ["eager", "compile"])
def test_a_fallback_is_an_error_under_strict(overflow):
    manager = make_manager(overflow=overflow)
    manager.warmup()
    with pytest.raises(BucketOverflow, match=f"strict=True forbids overflow='{overflow}'"):
        manager.bucket(tokens=9)
    assert manager.overflows == 1


def test_an_eager_fallback_runs_the_callable_and_is_counted_and_logged_once(caplog):
    module = Cache()
    manager = make_manager(module=module, overflow="eager", strict=False, backend="aot_eager")
    manager.warmup()
    module.sum.zero_()
    for tokens in (9, 9, 12):
        bucket = manager.bucket(tokens=tokens)
        result = manager.run(bucket, *inputs_of(bucket))
        assert result.shape == (tokens,) and not result.requires_grad
    assert (manager.overflows, manager.fallbacks) == (3, 3)
    assert module.sum[0].item() == 30
    assert manager.hits[Bucket(tokens=9)] == 2
    assert [r.getMessage() for r in caplog.records] == [
        "decode: runs eagerly: a need above the captured buckets: tokens=9; "
        "further ones are counted only"
    ]


def test_a_compile_fallback_captures_once_and_serves_from_then_on(caplog):
    manager = make_manager(overflow="compile", strict=False, backend="aot_eager")
    manager.warmup()
    for tokens in (12, 12, 11):
        bucket = manager.bucket(tokens=tokens)
        assert bucket == Bucket(tokens=12)
        assert manager.run(bucket, *inputs_of(bucket)).tolist() == [3] * 12
    assert (manager.overflows, manager.fallbacks) == (1, 1)
    assert len(caplog.records) == 1
    with no_compile(), pytest.raises(GraphBudgetExceeded, match=r"capture of decode\[tokens=20\]"):
        manager.bucket(tokens=20)
    assert manager.bucket(tokens=12) == Bucket(tokens=12)


def test_a_stale_graph_is_an_error_under_strict_and_a_counted_fallback_otherwise(caplog):
    module = Cache()
    strict, lenient = (
        make_manager(module=module, backend="aot_eager", strict=strict) for strict in (True, False)
    )
    bucket = Bucket(tokens=4)
    for manager in (strict, lenient):
        manager.warmup()
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
    manager = make_manager()
    manager.warmup()
    for need in ({}, {"rows": 1}, {"tokens": -1}):
        with pytest.raises(ValueError):
            manager.bucket(**need)
    assert sum(manager.hits.values()) == manager.overflows == 0
