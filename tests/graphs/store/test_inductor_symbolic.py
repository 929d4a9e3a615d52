"""Graphs of symbolic sizes in a store: one entry with its guards for all buckets."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from graphs import InputMismatch, StaleGraph, WarmupManager, explicit, linear, no_compile
from graphs.capture.contract import CaptureSpec, Job
from graphs.store import ArtifactStore, StoredInductor

AXES = ("tokens", "requests")
SPACE = explicit(AXES, [(2, 2), (8, 4), (16, 4)])


class Net(nn.Module):
    """Takes sizes that are an axis and a sum of two, returns what it makes, is given and counts."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor, both: Tensor, power: int):
        y = self.linear(x) ** power
        self.seen += y.sum(0)
        return {"y": y * x.shape[0], "sum": both[: x.shape[0]].sum(), "both": both, "power": power}


def inputs_of(bucket):
    return torch.randn(bucket.tokens, 4), torch.randn(bucket.tokens + bucket.requests), 2


def warm(store, module, space=SPACE, make_inputs=inputs_of, **options):
    backend = StoredInductor(store)
    options = {"symbolic": AXES, "timed_runs": 0, **options}
    manager = WarmupManager(module, space, make_inputs, backend=backend, **options)
    return backend, manager, manager.warmup()


def expect_the_same(manager, module, space=SPACE):
    with no_compile() as sentinel:
        for bucket in space:
            inputs = inputs_of(bucket)
            with torch.no_grad():
                expected = module(*inputs)
            got = manager.run(bucket, *inputs)
            torch.testing.assert_close(got["y"], expected["y"], atol=1e-5, rtol=1e-5)
            assert got["sum"].shape == () and got["both"] is inputs[1] and got["power"] == 2
    assert sentinel.events == ()


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A store that a warmup of a `Net` has filled."""
    store, module = ArtifactStore(tmp_path_factory.mktemp("filled") / "store"), Net()
    backend, manager, report = warm(store, module)
    assert (backend.stored, backend.loaded, report.graphs, report.compiles) == (1, 0, 1, 1)
    assert [entry.label.name for entry in store.entries()] == ["Net[tokens requests]"]
    expect_the_same(manager, module)
    return store


def test_one_entry_serves_all_buckets_of_a_later_warmup_and_new_ones(filled):
    space, module = explicit(AXES, [(2, 2), (8, 4), (16, 4), (32, 32), (7, 3)]), Net()
    backend, manager, report = warm(filled, module, space)
    assert (backend.stored, backend.loaded, report.graphs, report.compiles) == (0, 1, 1, 0)
    assert len(report.loaded) == len(space)
    expect_the_same(manager, module, space)


def test_a_loaded_graph_takes_the_sizes_of_its_bucket_only_and_sees_its_state(filled):
    module = Net()
    _, manager, _ = warm(filled, module)
    with pytest.raises(InputMismatch, match="'x' has shape"):
        manager.run(SPACE.largest, *inputs_of(next(iter(SPACE))))
    module.linear.bias = nn.Parameter(torch.ones(1))
    with pytest.raises(StaleGraph, match="bias"):
        manager.run(SPACE.largest, *inputs_of(SPACE.largest))


class Scaled(nn.Module):
    """Has a number that may change from bucket to bucket."""

    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def test_a_bucket_for_which_the_callable_was_changed_gets_a_graph_of_its_own_when_loaded(store):
    """As at the first start, where guards of Dynamo see it."""
    space = explicit(("tokens",), [(4,), (8,), (16,)])
    for stored, loaded in ((3, 0), (0, 3)):
        module = Scaled()

        def make_inputs(bucket, module=module):
            module.factor = float(bucket.tokens)
            return [torch.ones(bucket.tokens)]

        backend, manager, _ = warm(store, module, space, make_inputs, symbolic=("tokens",))
        assert (backend.stored, backend.loaded) == (stored, loaded)
        for bucket in space:
            module.factor = float(bucket.tokens)
            x = torch.randn(bucket.tokens)
            torch.testing.assert_close(manager.run(bucket, x), x * bucket.tokens)


def test_fixed_sizes_are_another_entry(filled):
    backend = StoredInductor(filled)
    with torch.no_grad():
        assert not backend.has(Job(Net(), inputs_of(SPACE.largest), CaptureSpec(backend)))


def test_a_bucket_whose_inputs_share_memory_does_not_run_the_stored_graph(filled):
    """Not a graph that was compiled for inputs that do not."""

    def make_inputs(bucket):
        x, both, power = inputs_of(bucket)
        shared = torch.randn(4 * bucket.tokens + bucket.requests)
        if bucket.tokens == 8:
            x, both = shared[: 4 * 8].view(8, 4), shared[2 * 8 :][: len(both)]
        return x, both, power

    backend, manager, report = warm(filled, Net(), make_inputs=make_inputs)
    assert len(report.captured) == len(SPACE)
    assert backend.loaded == 1 and len(report.loaded) == len(SPACE) - 1
    inputs = make_inputs(SPACE.pick(tokens=8, requests=4))
    got = manager.run(SPACE.pick(tokens=8, requests=4), *inputs)
    torch.testing.assert_close(got["sum"], inputs[1][:8].sum())


def by_size(x: Tensor) -> Tensor:
    return x * 2 if x.shape[0] > 10 else x - 1


def test_each_bucket_loads_the_graph_whose_guards_hold_for_it(store):
    space = linear(tokens=(4, 4, 16))

    def make_inputs(bucket):
        return [torch.ones(bucket.tokens)]

    for stored, loaded in ((2, 0), (0, 2)):
        backend, manager, report = warm(store, by_size, space, make_inputs, symbolic=("tokens",))
        assert (backend.stored, backend.loaded, report.graphs) == (stored, loaded, 2)
        for bucket in space:
            x = torch.randn(bucket.tokens)
            assert torch.equal(manager.run(bucket, x), by_size(x))
    assert "11 <= x.size()[0]" in report.results[2].why_alone


def doubled(x, is_large):
    return x * 2 if is_large else x * 10


def sized(x):
    return x * 2, 1.0 / x.shape[0], 16


@pytest.mark.parametrize("kind", ["constant", "dtype"])
def test_a_bucket_with_another_constant_or_dtype_gets_a_graph_of_its_own_when_loaded(store, kind):
    def inputs(bucket):
        n = bucket.tokens
        dtype = torch.float64 if kind == "dtype" and n < 9 else torch.float32
        return torch.ones(n, 8, dtype=dtype), kind == "constant" and n < 9

    space = explicit(("tokens",), [(4,), (8,), (16,)])
    for _ in range(2):  # compiled, then loaded
        torch._dynamo.reset()
        _, manager, _ = warm(store, doubled, space, inputs, symbolic=("tokens",))
        for bucket in space:
            own = inputs(bucket)
            torch.testing.assert_close(manager.run(bucket, *own), doubled(*own))


def test_what_returns_sizes_is_not_stored(store, caplog):
    space = explicit(("tokens",), [(4,), (8,), (16,)])
    job = sized, space, lambda bucket: [torch.ones(bucket.tokens, 8)]
    backend, manager, _ = warm(store, *job, symbolic=("tokens",))
    assert backend.stored == 0 and "return tensors alone" in caplog.text
    for bucket in space:
        assert manager.run(bucket, torch.ones(bucket.tokens, 8))[1:] == (1.0 / bucket.tokens, 16)
