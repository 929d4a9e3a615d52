"""The contract of the cudagraph backend, on a double that replays at fixed addresses."""

from __future__ import annotations

import gc
import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from graphs import (
    CaptureError,
    InputMismatch,
    StaleGraph,
    WarmupManager,
    capture,
    linear,
    no_compile,
)
from graphs.backends.cudagraph import CudaGraphBackend, CudaRecorder
from graphs.backends.recorded import _devices_of
from graphs.capture.contract import CaptureSpec, Job
from graphs.store import ArtifactStore, StoredInductor
from tests.graphs.backends.replay_double import ReplayDouble

pytestmark = pytest.mark.usefixtures("no_grad")


class Layer(nn.Module):
    """Adds a buffer that counts calls, and a constant input."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))
        self.weight = nn.Parameter(torch.full((3,), 2.0))

    def forward(self, x, add):
        self.count.add_(1)
        return x * self.weight + add + self.count


class Scene:
    """A layer, the doubles made for it, and graphs of it."""

    def __init__(self) -> None:
        self.layer = Layer()
        self.doubles: list[ReplayDouble] = []
        self.backend = CudaGraphBackend(self._double)

    def _double(self) -> ReplayDouble:
        self.doubles.append(ReplayDouble((self.layer.count,)))
        return self.doubles[-1]

    def capture(self, function, *inputs, compiler="eager", **options):
        options = {"backend": self.backend, "compiler": compiler, **options}
        return capture(function, inputs, **options)

    def of_rows(self, rows, **options):
        return self.capture(self.layer, torch.zeros(rows, 3), 10, **options)


@pytest.fixture
def scene():
    return Scene()


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_a_replay_equals_the_callable_with_what_it_keeps(scene, compiler):
    graph = scene.of_rows(4, compiler=compiler)
    scene.layer.count.zero_()
    eager = Layer()
    with no_compile() as sentinel:
        for seed in range(3):
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
            torch.testing.assert_close(graph.run(x, 10), eager(x, 10))
    assert scene.layer.count == 3 == scene.doubles[0].replays == sentinel.replays


def test_recording_runs_nothing_and_warming_runs_what_was_asked_for(scene):
    scene.of_rows(4, warm_runs=3)
    assert scene.doubles[0].warm_runs == 3 and scene.layer.count == 3


def test_static_inputs_are_filled_in_place_or_copied_to(scene):
    graph = scene.of_rows(4)
    (static,) = graph.static_inputs
    address = static.data_ptr()
    static.fill_(5)
    scene.layer.count.zero_()
    assert graph.run(static, 10).unique().tolist() == [21]
    other = torch.ones(4, 3)
    assert graph.run(other, 10).unique().tolist() == [14]
    assert graph.static_inputs[0].data_ptr() == address and static.eq(1).all()


def test_graphs_of_one_callable_share_one_pool_and_the_buffers_of_the_largest(scene):
    graphs = {rows: scene.of_rows(rows) for rows in (64, 16, 4)}
    assert len(scene.doubles) == 1
    assert len({graph.static_inputs[0].data_ptr() for graph in graphs.values()}) == 1
    scene.layer.count.zero_()
    for step, rows in enumerate((4, 64, 16, 64), start=1):
        assert graphs[rows].run(torch.ones(rows, 3), 10).unique().tolist() == [12 + step]


def test_a_larger_graph_captured_later_leaves_the_others_where_they_are(scene):
    small, large = scene.of_rows(4), scene.of_rows(500)
    assert small.static_inputs[0].data_ptr() != large.static_inputs[0].data_ptr()
    scene.layer.count.zero_()
    assert large.run(torch.ones(500, 3), 10).unique().tolist() == [13]
    assert small.run(torch.ones(4, 3), 10).unique().tolist() == [14]


def test_an_output_holds_until_the_next_replay_and_a_fresh_one_for_good(scene):
    one, two = scene.of_rows(4), scene.of_rows(4, fresh_outputs=True)
    scene.layer.count.zero_()
    first = one.run(torch.ones(4, 3), 10)
    value = first.clone()
    fresh = two.run(torch.zeros(4, 3), 10)
    assert not torch.equal(first, value)  # overwritten, in the pool they share
    assert fresh.unique().tolist() == [12]
    one.run(torch.full((4, 3), 7.0), 10)
    assert fresh.unique().tolist() == [12]


def writes_its_input(cache, new):
    cache[0] = new
    return cache.sum()


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_an_input_that_is_written_to_is_copied_back(scene, compiler):
    graph = scene.capture(writes_its_input, torch.zeros(3, 2), torch.ones(2), compiler=compiler)
    cache, new = torch.ones(3, 2), torch.full((2,), 4.0)
    assert graph.run(cache, new) == 12
    assert cache.tolist() == [[4, 4], [1, 1], [1, 1]] and new.eq(4).all()


def test_an_example_that_the_callable_writes_to_is_written(scene):
    example = torch.zeros(3, 2)
    scene.capture(writes_its_input, example, torch.ones(2))
    assert example[0].eq(1).all()


def test_a_written_input_that_shares_memory_with_another_is_refused(scene):
    both = torch.zeros(4, 2)
    with pytest.raises(CaptureError, match="input 0 is written to and shares memory"):
        scene.capture(writes_its_input, both[:3], both[3])


def test_padding_that_the_caller_left_is_what_the_graph_reads(scene):
    graph = scene.capture(lambda x, n: (x.sum(), n), torch.zeros(8), None)
    padded = torch.zeros(8)
    padded[:3] = 1
    assert graph.run(torch.ones(8), None)[0] == 8
    assert graph.run(padded, None)[0] == 3  # nothing of the step before


def test_strided_and_empty_inputs_keep_their_layout(scene):
    wide = torch.arange(12.0).view(3, 4)
    graph = scene.capture(lambda x, e: torch.cat((x.flatten(), e)), wide.t(), torch.zeros(0))
    assert graph.static_inputs[0].stride() == (1, 4)
    torch.testing.assert_close(graph.run(wide.t() + 1, torch.zeros(0)), (wide.t() + 1).flatten())


def test_a_weight_that_moved_makes_the_graph_stale(scene):
    graph = scene.of_rows(4)
    count = scene.layer.count.clone()
    weight = scene.layer.weight
    scene.layer.weight = nn.Parameter(weight.clone())
    with pytest.raises(StaleGraph, match="'weight' has moved"):
        graph.run(torch.ones(4, 3), 10)
    assert torch.equal(scene.layer.count, count)
    scene.layer.weight = weight
    graph.run(torch.ones(4, 3), 10)


def test_a_buffer_that_moved_makes_the_graph_stale(scene):
    graph = scene.of_rows(4)
    scene.layer.count.data = torch.zeros(1)
    with pytest.raises(StaleGraph, match="'count' has moved"):
        graph.run(torch.ones(4, 3), 10)


def test_wrong_inputs_are_refused_before_anything_is_copied(scene):
    graph = scene.of_rows(4)
    with pytest.raises(InputMismatch, match="'add' is 11"):
        graph.run(torch.ones(4, 3), 11)
    assert not graph.static_inputs[0].any() and scene.doubles[0].replays == 0


def test_inputs_of_another_device_are_refused(scene):
    with pytest.raises(CaptureError, match="input 0 is on meta; expected all tensors on cpu"):
        scene.capture(torch.relu, torch.zeros(2, device="meta"))


def test_gradients_are_refused(scene):
    with torch.enable_grad(), pytest.raises(CaptureError, match=r"under torch\.no_grad"):
        scene.of_rows(4)


def test_capture_under_inference_mode_still_sees_what_is_written(scene):
    with torch.inference_mode():
        graph = scene.capture(writes_its_input, torch.zeros(3, 2), torch.ones(2))
        cache = torch.zeros(3, 2)
        graph.run(cache, torch.full((2,), 3.0))
    assert cache[0].eq(3).all()


def test_closing_frees_the_graph_and_the_callable_its_memory(scene):
    graph = scene.of_rows(4)
    graph.close()
    assert scene.doubles[0].closed == 1
    with pytest.raises(CaptureError, match="is closed"):
        graph.run(torch.ones(4, 3), 10)
    double = weakref.ref(scene.doubles.pop())
    scene.layer = None
    del graph
    gc.collect()
    assert double() is None


def test_a_manager_serves_all_its_buckets_from_one_pool(scene):
    manager = WarmupManager(
        scene.layer,
        linear(rows=(8, 8, 32)),
        lambda bucket: [torch.zeros(bucket.rows, 3), 10],
        backend=scene.backend,
        compiler="eager",
    )
    manager.warmup()
    assert len(scene.doubles) == 1
    scene.layer.count.zero_()
    for step, rows in enumerate((8, 32, 16), start=1):
        out = manager({"rows": rows}, torch.ones(rows, 3), 10)
        assert out.unique().tolist() == [12 + step]


def test_buckets_share_compiled_code_and_a_later_start_only_records(scene, tmp_path):
    def warm(store):
        layer = Layer()
        double = ReplayDouble((layer.count,))
        backend = CudaGraphBackend(lambda: double, StoredInductor(store))
        manager = WarmupManager(
            layer,
            linear(rows=(8, 8, 32)),
            lambda bucket: [torch.zeros(bucket.rows, 3), 10],
            backend=backend,
            symbolic=("rows",),
        )
        report = manager.warmup()
        layer.count.zero_()
        for step, rows in enumerate((8, 32, 16), start=1):
            out = manager({"rows": rows}, torch.ones(rows, 3), 10)
            assert out.unique().tolist() == [12 + step]
        assert double.replays == 3 + 3 * len(report.results)  # those that were timed
        return report

    store = ArtifactStore(tmp_path / "store")
    first = warm(store)
    assert first.graphs == 1 and first.compiles > 0 and len(first.loaded) == 0
    torch._dynamo.reset()
    second = warm(store)
    assert second.compiles == 0 and len(second.loaded) == len(second.results)


def test_all_inputs_lie_on_one_device_whose_streams_are_recorded(scene):
    def places(*inputs):
        return _devices_of("cuda", Job(torch.add, inputs, CaptureSpec(scene.backend)))

    with FakeTensorMode():
        one, two, host = (torch.empty(2, device=device) for device in ("cuda:1", "cuda:0", "cpu"))
    assert places(3, one, one) == (torch.device("cuda", 1), {})
    assert places(one, host) == (torch.device("cuda", 1), {1: "input 1"})
    with pytest.raises(ValueError, match="input 1 is on cuda:0; expected all tensors on cuda:1"):
        places(one, two)
    with pytest.raises(ValueError, match="input 0 is on cpu; expected all tensors on cuda"):
        places(host)


def test_graphs_are_recorded_on_a_stream_of_their_own_device(monkeypatch):
    devices, used = iter((0, 1, 0)), []

    @contextmanager
    def graph(_, *, pool, stream):
        used.append((pool, stream))
        yield

    monkeypatch.setattr(torch.cuda, "current_device", lambda: next(devices))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: f"a stream of {device}, {len(used)}")
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=None, reset=None))
    monkeypatch.setattr(torch.cuda, "graph", graph)
    recorder = CudaRecorder()
    assert [recorder.record(lambda: 5).outputs for _ in range(3)] == [5, 5, 5]
    first, second = ("pool", "a stream of 0, 0"), ("pool", "a stream of 1, 1")
    assert used == [first, second, first]


def test_without_a_device_the_reason_is_given():
    if torch.cuda.is_available():
        pytest.skip("has a CUDA device")
    assert "use backend 'inductor'" in CudaGraphBackend().available()


@pytest.mark.gpu
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_on_a_device_replays_equal_eager_at_every_bucket(compiler):
    layer, eager = Layer().cuda(), Layer().cuda()
    backend = CudaGraphBackend()
    graphs = {
        rows: capture(
            layer, [torch.zeros(rows, 3, device="cuda"), 10], backend=backend, compiler=compiler
        )
        for rows in (64, 16, 4)
    }
    layer.count.zero_()
    for rows in (4, 64, 16, 64):
        x = torch.randn(rows, 3, device="cuda")
        torch.testing.assert_close(graphs[rows].run(x, 10), eager(x, 10))
    assert layer.count == 4


@pytest.mark.gpu
def test_on_a_device_a_written_input_is_copied_back():
    zeros, ones = torch.zeros(3, 2, device="cuda"), torch.ones(2, device="cuda")
    graph = capture(writes_its_input, [zeros, ones], backend=CudaGraphBackend())
    cache = torch.ones(3, 2, device="cuda")
    assert graph.run(cache, ones * 4) == 12
    assert cache[0].eq(4).all() and cache[1:].eq(1).all()


def test_examples_in_place_are_what_the_graph_reads(scene):
    buffer = torch.zeros(12)
    example = buffer.view(4, 3)
    graph = scene.capture(scene.layer, example, 10, in_place=True)
    assert graph.static_inputs[0].data_ptr() == buffer.data_ptr()
    scene.layer.count.zero_()
    buffer.fill_(5)
    assert graph.run(example, 10).unique().tolist() == [21]
    assert buffer.eq(5).all()
