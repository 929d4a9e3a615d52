"""Warmups with symbolic sizes: one compile for many buckets, and one more where it does not fit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from graphs import (
    Bucket,
    CaptureError,
    InputMismatch,
    StaleGraph,
    WarmupManager,
    explicit,
    linear,
    no_compile,
)
from graphs.capture.contract import Backend, Frozen
from graphs.capture.symbolic import SymbolicSizes
from graphs.warmup import capturing
from graphs.warmup.schedule import _varying_dims

AXES = ("tokens", "requests")
SPACE = explicit(AXES, [(1, 1), (2, 2), (4, 4), (8, 4), (16, 4)])


class Step(nn.Module):
    """Sizes that are an axis, a sum and a product of both, and one that is no size of a bucket."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 4)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor, starts: Tensor, pairs: Tensor, fixed: Tensor) -> Tensor:
        self.calls += 1
        tokens, requests = x.shape[0], starts.shape[0] - 1
        rows = self.linear(x).relu() + pairs.view(tokens, requests).sum(1, keepdim=True)
        return rows @ fixed + starts.sum()


def inputs_of(bucket: Bucket) -> list[Tensor]:
    generator = torch.Generator().manual_seed(bucket.tokens)
    shapes = (
        (bucket.tokens, 6),
        (bucket.requests + 1,),
        (bucket.tokens * bucket.requests,),
        (4, 3),
    )
    return [torch.randn(shape, generator=generator) for shape in shapes]


def warm(module=None, space=SPACE, make_inputs=inputs_of, **options):
    options = {"backend": "aot_eager", "symbolic": AXES, "name": "step", **options}
    manager = WarmupManager(module or Step(), space, make_inputs, **options)
    return manager, manager.warmup()


@pytest.mark.parametrize("order", ["largest_first", "smallest_first"])
def test_one_compile_serves_all_buckets_but_those_of_size_one(order):
    _, report = warm(order=order)
    shared = {str(result.bucket): result.graph for result in report.captured}
    assert shared.pop("tokens=1 requests=1") == "step[tokens=1 requests=1]"
    assert [*shared.values()] == ["step[tokens requests]"] * 4
    assert (report.graphs, report.compiles) == (2, 2)
    assert not any(result.why_alone for result in report.results)
    assert "5 of 5 buckets captured" in str(report) and "2 graphs, 2 compiles" in str(report)
    assert report.to_json()["graphs"] == 2


def test_a_shared_graph_computes_what_a_graph_of_fixed_sizes_does():
    module = Step()
    shared, _ = warm(module)
    fixed, report = warm(module, symbolic=())
    assert report.graphs == report.compiles == len(SPACE)
    with no_compile() as sentinel:
        for bucket in SPACE:
            inputs = inputs_of(bucket)
            got, expected = shared.run(bucket, *inputs), fixed.run(bucket, *inputs)
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)
    assert sentinel.events == ()


def test_every_bucket_is_run_before_it_serves():
    module = Step()
    warm(module, timed_runs=0)
    assert module.calls.item() == len(SPACE)


@pytest.mark.parametrize(("runs", "expected"), [(1, 2), (2, 3), (9, len(SPACE))])
def test_so_many_buckets_run_a_graph_that_they_share(runs, expected):
    module = Step()
    manager, report = warm(module, timed_runs=0, shared_runs=runs)
    assert module.calls.item() == expected
    assert (len(report.captured), report.graphs) == (len(SPACE), 2)
    for bucket in SPACE:
        inputs = inputs_of(bucket)
        torch.testing.assert_close(manager.run(bucket, *inputs), module(*inputs))


def test_a_bucket_that_did_not_run_knows_what_the_graph_writes_to():
    def add(x, y):
        x.add_(y)
        return x * 1

    def inputs(bucket):
        return [torch.zeros(bucket.rows), torch.zeros(bucket.rows)]

    space = explicit(["rows"], [2, 4, 8])
    manager, _ = warm(add, space, inputs, symbolic=["rows"], shared_runs=1)
    memory = torch.zeros(8)
    with pytest.raises(InputMismatch, match="overlap in memory"):
        manager.run(Bucket(rows=4), memory[:4], memory[2:6])


def test_a_graph_that_never_runs_is_refused():
    with pytest.raises(ValueError, match="shared_runs is 0; expected at least 1"):
        warm(shared_runs=0)


def test_a_long_run_of_a_graph_that_ran_before_is_timed_in_its_capture(monkeypatch):
    monkeypatch.setattr(capturing, "_LONG", 0.0)
    module = Step()
    _, report = warm(module, timed_runs=3)
    assert module.calls.item() == report.graphs * (1 + 3) + (len(SPACE) - report.graphs)
    assert len(report.cost) == len(SPACE) and all(seconds > 0 for _, seconds in report.cost)


def test_a_bucket_takes_inputs_of_its_own_sizes_only():
    manager, _ = warm()
    inputs = inputs_of(Bucket(tokens=8, requests=4))
    with pytest.raises(InputMismatch, match=r"step\[tokens=16 requests=4\]: tensor 'x' has shape"):
        manager.run(Bucket(tokens=16, requests=4), *inputs)


def test_a_guard_that_fails_at_serving_is_an_error_and_runs_nothing():
    module = Step()
    manager, _ = warm(module)
    module.linear.bias = None
    for bucket in SPACE:
        with pytest.raises(StaleGraph):
            manager.run(bucket, *inputs_of(bucket))
    lenient, _ = warm(module, strict=False)
    module.linear.bias = nn.Parameter(torch.ones(4))
    lenient.run(SPACE.largest, *inputs_of(SPACE.largest))
    assert lenient.fallbacks == 1


def test_views_of_one_buffer_are_shared_as_other_inputs_are():
    buffers = inputs_of(SPACE.largest)

    def views(bucket: Bucket) -> list[Tensor]:
        sizes = (bucket.tokens, bucket.requests + 1, bucket.tokens * bucket.requests, 4)
        return [buffer[:size] for buffer, size in zip(buffers, sizes, strict=True)]

    module = Step()
    manager, report = warm(module, make_inputs=views)
    assert report.graphs == 2
    bucket = Bucket(tokens=4, requests=4)
    torch.testing.assert_close(manager.run(bucket, *views(bucket)), module(*views(bucket)))


def test_the_inputs_keep_no_mark_of_the_compile():
    inputs = {bucket: inputs_of(bucket) for bucket in SPACE}
    before = [set(vars(tensor)) for tensor in inputs[SPACE.largest]]
    warm(make_inputs=inputs.__getitem__)
    assert [set(vars(tensor)) for tensor in inputs[SPACE.largest]] == before


def by_size(x: Tensor) -> Tensor:
    return x * 2 if x.shape[0] > 10 else x - 1


def of_fixed_size(x: Tensor, n: int) -> Tensor:
    return x * n


def test_a_bucket_that_does_not_fit_gets_a_graph_that_others_may_share(caplog):
    space = linear(tokens=(4, 4, 16))
    manager, report = warm(
        by_size, space, lambda b: [torch.ones(b.tokens)], symbolic=("tokens",), name="step"
    )
    assert [r.graph for r in report.results] == ["step[tokens]"] * 2 + ["step[tokens] 2"] * 2
    assert [r.why_alone for r in report.results if r.why_alone] == [
        "it does not fit step[tokens]: 11 <= x.size()[0]"
    ]
    assert "step[tokens=8]: compiled by itself" in caplog.text
    with no_compile():
        for bucket in space:
            x = torch.randn(bucket.tokens)
            assert torch.equal(manager.run(bucket, x), by_size(x))


def test_the_reason_is_the_size_that_does_not_fit_not_another_relation():
    def both(x: Tensor, y: Tensor) -> Tensor:
        return by_size(x + y)

    space = linear(tokens=(4, 4, 12))
    _, report = warm(
        both, space, lambda b: [torch.ones(b.tokens), torch.ones(b.tokens)], symbolic=("tokens",)
    )
    assert [r.why_alone for r in report.results if r.why_alone] == [
        "it does not fit step[tokens]: 11 <= x.size()[0]"
    ]


def test_a_constant_that_differs_between_buckets_is_never_shared():
    space = linear(tokens=(4, 4, 12))
    manager, report = warm(
        of_fixed_size, space, lambda b: [torch.ones(b.tokens), b.tokens], symbolic=("tokens",)
    )
    assert report.graphs == 3 and "n == 12" in report.results[1].why_alone
    for bucket in space:
        out = manager.run(bucket, torch.ones(bucket.tokens), bucket.tokens)
        assert out.tolist() == [bucket.tokens] * bucket.tokens


def test_where_symbols_cannot_be_compiled_each_bucket_has_a_graph_of_its_own(monkeypatch, caplog):
    def refuse(self, *_, **__):
        raise CaptureError("step", "no kernel for symbols")

    monkeypatch.setattr("graphs.backends.inductor.InductorBackend.shared", refuse)
    manager, report = warm()
    assert report.graphs == len(report.captured) == len(SPACE)
    reasons = [result.why_alone for result in report.results if result.why_alone]
    assert len(reasons) == 4 and "no kernel for symbols" in reasons[0]
    assert caplog.text.count("compiled at fixed sizes") == 1
    manager.run(SPACE.largest, *inputs_of(SPACE.largest))


def test_axes_that_are_not_symbolic_are_compiled_apart():
    _, report = warm(symbolic=("tokens",))
    assert [result.graph for result in report.results] == [
        *["step[tokens requests=4]"] * 3,
        "step[tokens=2 requests=2]",
        "step[tokens=1 requests=1]",
    ]


def test_a_backend_without_symbols_and_an_unknown_axis_are_refused():
    class Plain(Backend):
        name = "plain"

        def capture(self, job):
            return Frozen(job.function)

    with pytest.raises(CaptureError, match="'plain' captures at fixed sizes only: leave symbolic"):
        warm(backend=Plain())
    with pytest.raises(ValueError, match="symbolic has 'rows'; expected axes of the buckets: tok"):
        warm(symbolic=("rows",))


def test_a_warmup_after_close_compiles_again():
    manager, _ = warm()
    manager.close()
    assert manager.warmup().graphs == 2
    assert manager.run(SPACE.largest, *inputs_of(SPACE.largest)).shape == (16, 3)


def test_sizes_that_differ_are_found_by_comparing_inputs():
    here = [torch.ones(4, 3), torch.ones(1), 5, torch.ones(2)]
    there = [torch.ones(8, 3), torch.ones(2), 6, torch.ones(2, 2)]
    assert _varying_dims(here, [there]) == [(0,), (), (), ()]
    assert _varying_dims(here, []) == [(), (), (), ()]


def test_each_graph_is_captured_on_inputs_of_its_own_where_all_lie_in_one_memory():
    memory = torch.zeros(16)

    def in_memory(bucket: Bucket) -> list[Tensor]:
        memory.fill_(bucket.tokens)  # as a buffer that each step is copied to
        return [memory[: bucket.tokens]]

    class Wrong(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.count += (x != x.shape[0]).sum()
            return x + 1

    module = Wrong()
    warm(module, linear(tokens=(2, 2, 16)), in_memory, symbolic=("tokens",))
    assert module.count == 0


def _doubles(x):
    return x * 2


def _fails_on_four(x):
    if len(x) == 4:
        raise RuntimeError("inputs share memory")
    return x * 2


def _captured(symbolic, run, size, alone=_doubles):
    make, alone = Frozen(run, is_loaded=True), Frozen(alone)
    return symbolic.capture("net", [torch.ones(size)], 1, lambda: make, lambda: alone)


def test_where_the_shared_graph_fails_the_capture_is_alone_and_says_why(caplog):
    symbolic = SymbolicSizes("net[n]", [(0,)])
    assert _captured(symbolic, _fails_on_four, 8).shared_as == "net[n]"
    alone = _captured(symbolic, _fails_on_four, 4)
    assert not alone.is_loaded and not alone.shared_as
    assert alone.why_alone == "net[n] fails on its inputs: RuntimeError: inputs share memory"
    assert f"net: compiled at fixed sizes: {alone.why_alone}" in caplog.text
    assert _captured(symbolic, _fails_on_four, 6).shared_as == "net[n]"


def test_what_fails_in_either_way_is_an_error_of_the_capture():
    symbolic = SymbolicSizes("net[n]", [(0,)])
    _captured(symbolic, _fails_on_four, 8)

    def alone():
        raise CaptureError("net", "a graph break")

    with pytest.raises(CaptureError, match="a graph break"):
        symbolic.capture("net", [torch.ones(4)], 1, lambda: None, alone)
