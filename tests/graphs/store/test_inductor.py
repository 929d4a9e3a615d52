"""Graphs of inductor that a later capture loads, without tracing and without compiling."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from graphs import InputMismatch, ModeMismatch, StaleGraph, capture
from graphs.backends.inductor import InductorBackend
from graphs.capture.contract import CaptureSpec, Frozen, Job
from graphs.store import ArtifactStore, StoredInductor
from graphs.store.lock import Lock
from graphs.watch.compiles import CompileWatch

ROOT = Path(__file__).resolve().parents[3]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(3, 4))
        self.scale = 0.5

    def forward(self, x, rows, power):
        y = self.linear(x) ** power * self.scale
        self.seen.index_copy_(0, rows, y)
        return {"y": y, "sums": [self.seen.sum(1), power], "x": x, "seen": self.seen}


INPUTS = (torch.randn(2, 4), torch.tensor([2, 0]), 2)


pytestmark = pytest.mark.usefixtures("without_gradients")


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    """A store that has the graph of a `Net`."""
    backend = StoredInductor(ArtifactStore(tmp_path_factory.mktemp("warm") / "store"))
    torch.manual_seed(0)
    with torch.no_grad():
        capture(Net(), INPUTS, backend=backend)
    assert (backend.stored, backend.loaded) == (1, 0)
    return backend.store


def load(warm, net):
    backend = StoredInductor(warm)
    with CompileWatch() as watch:
        graph = capture(net, INPUTS, backend=backend)
    assert (backend.stored, backend.loaded, watch.compiles) == (0, 1, 0)
    return graph


def test_a_loaded_graph_computes_writes_and_returns_as_the_module_does(warm):
    net, twin = Net(), Net()
    graph = load(warm, net)
    twin.load_state_dict(net.state_dict())
    got, expected = graph.run(*INPUTS), twin(*INPUTS)
    torch.testing.assert_close(got["y"], expected["y"])
    torch.testing.assert_close(got["sums"][0], expected["sums"][0])
    torch.testing.assert_close(net.seen, twin.seen)
    assert got["sums"][1] == 2 and got["x"] is INPUTS[0] and got["seen"] is net.seen


def test_what_another_environment_compiles_as_it_loads_a_graph_is_sealed_too(warm):
    sealed = []
    backend = StoredInductor(warm, lambda: sealed.append(backend.loaded))
    capture(Net(), INPUTS, backend=backend)
    assert sealed == [1]


def test_a_loaded_graph_reads_weights_that_were_changed_or_exchanged(warm):
    net = Net()
    graph = load(warm, net)
    net.linear.weight.zero_()
    net.linear.bias = nn.Parameter(torch.full((4,), 2.0))
    torch.testing.assert_close(graph.run(*INPUTS)["y"], torch.full((2, 4), 2.0))


def test_a_loaded_graph_refuses_other_inputs_modes_and_state(warm):
    net = Net()
    graph = load(warm, net)
    with pytest.raises(InputMismatch):
        graph.run(torch.randn(3, 4), *INPUTS[1:])
    with pytest.raises(InputMismatch):
        graph.run(*INPUTS[:2], 3)
    with torch.enable_grad(), pytest.raises(ModeMismatch):
        graph.run(*INPUTS)
    net.linear.bias = nn.Parameter(torch.ones(1))
    with pytest.raises(StaleGraph, match=r"'linear.bias' has shape"):
        graph.run(*INPUTS)


def test_a_module_of_other_values_is_not_served_from_the_store(warm):
    net = Net()
    net.scale = 0.25
    backend = StoredInductor(warm)
    graph = capture(net, INPUTS, backend=backend)
    assert (backend.stored, backend.loaded) == (1, 0)
    torch.testing.assert_close(graph.run(*INPUTS)["y"], net.linear(INPUTS[0]) ** 2 * 0.25)


SCALE = 2


def scaled(x):
    return x * SCALE


def test_a_changed_global_is_seen_by_the_next_capture_of_a_process(store, monkeypatch):
    backend, x = StoredInductor(store), INPUTS[0]
    for scale, counts in ((2, (1, 0)), (3, (2, 0)), (2, (2, 1))):
        monkeypatch.setitem(globals(), "SCALE", scale)
        torch.testing.assert_close(capture(scaled, [x], backend=backend).run(x), x * scale)
        assert (backend.stored, backend.loaded) == counts


def test_globals_that_a_capture_changes_itself_do_not_count(store, monkeypatch):
    def make_scale(x):
        globals()["SCALE"] = 5
        return x + 1

    monkeypatch.setitem(globals(), "SCALE", 2)
    backend = StoredInductor(store)
    job = Job(make_scale, [torch.ones(1)], CaptureSpec(backend, "make_scale"))
    before = backend.factors(job)

    def make(folder):
        make_scale(torch.ones(1))
        return Frozen(make_scale), lambda: None

    backend.capture_and_store(job, before, make)
    assert SCALE == 5 and backend.factors(job) == before
    globals()["SCALE"] = 6
    assert backend.factors(job) != before


def test_a_damaged_graph_is_compiled_again(store, caplog):
    backend = StoredInductor(store)
    capture(torch.relu, [INPUTS[0]], backend=backend)
    path = backend.store.entries()[0].files / "graph.bin"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    graph = capture(torch.relu, [INPUTS[0]], backend=backend)
    assert "discarded" in caplog.text
    assert (backend.stored, backend.loaded) == (2, 0)
    assert torch.equal(graph.run(INPUTS[0]), torch.relu(INPUTS[0]))


def test_what_reads_a_tensor_that_is_no_input_works_but_is_not_stored(store, caplog):
    hidden = torch.randn(4)
    backend = StoredInductor(store)
    graph = capture(lambda x: x + hidden, [INPUTS[0]], backend=backend)
    assert "not stored: ValueError" in caplog.text and backend.stored == 0
    torch.testing.assert_close(graph.run(INPUTS[0]), INPUTS[0] + hidden)


def test_inputs_that_are_one_tensor_are_not_stored(store, caplog):
    """Dynamo makes one input of them, and guards that; a loaded graph has no guards."""
    backend, x = StoredInductor(store), torch.ones(2, 4)
    graph = capture(torch.sub, [x, x], backend=backend)
    assert "not stored: inputs " in caplog.text and backend.stored == 0
    assert torch.equal(graph.run(x, x), torch.zeros(2, 4))
    with pytest.raises(StaleGraph):
        graph.run(x, x + 1)


def test_a_loaded_graph_refuses_one_tensor_in_two_places(store):
    def add_twice(a, b):
        return a.add_(1) + b

    for loaded in (False, True):
        graph = capture(add_twice, [torch.ones(4), torch.ones(4)], backend=StoredInductor(store))
        assert graph.is_loaded is loaded
        x = torch.ones(4)
        with pytest.raises(StaleGraph):
            graph.run(x, x)
        assert torch.equal(x, torch.ones(4))


@pytest.mark.parametrize(
    ("settings", "grad", "reason"),
    [
        ({"mode": "default"}, False, "give options instead"),
        ({}, True, "capture under torch.no_grad()"),
        ({"options": {"post_grad_custom_post_pass": object()}}, False, "without uuid()"),
    ],
)
def test_what_cannot_be_stored_says_why(store, monkeypatch, caplog, settings, grad, reason):
    def plain(self, job):
        return Frozen(job.function)

    monkeypatch.setattr(InductorBackend, "alone", plain)
    backend = StoredInductor(store)
    with torch.set_grad_enabled(grad):
        capture(torch.relu, [INPUTS[0]], backend=backend, **settings)
    assert reason in caplog.text and "relu: not stored: " in caplog.text
    assert not backend.has(Job(torch.relu, [torch.ones(7)], CaptureSpec(backend, "", settings)))


def test_an_input_that_is_a_buffer_is_not_stored(store, caplog):
    net, backend = Net(), StoredInductor(store)
    capture(net, [net.seen[:2], INPUTS[1], 2], backend=backend)
    assert "input 'x' shares memory with 'seen'" in caplog.text and backend.stored == 0


def test_a_store_that_is_busy_or_gone_costs_a_compile_and_no_graph(tmp_path, caplog):
    store = ArtifactStore(tmp_path / "store", lock_seconds=0.05)
    lock = Lock(store.path / ".lock")
    assert lock.take()
    try:
        busy = capture(torch.relu, [INPUTS[0]], backend=StoredInductor(store))
    finally:
        lock.close()
    assert caplog.text.count("StoreBusy") == 2  # not loaded, not stored
    shutil.rmtree(store.path)
    gone = capture(torch.relu, [INPUTS[0]], backend=StoredInductor(store))
    for graph in (busy, gone):
        assert torch.equal(graph.run(INPUTS[0]), torch.relu(INPUTS[0])) and not graph.is_loaded


def test_a_callable_without_a_hash_can_be_stored(store):
    @dataclass
    class Scale:
        factor: float

        def __call__(self, x):
            return x * self.factor

    for factor, loaded in ((2.0, False), (3.0, False), (2.0, True)):
        graph = capture(Scale(factor), [INPUTS[0]], backend=StoredInductor(store))
        assert graph.is_loaded is loaded
        assert torch.equal(graph.run(INPUTS[0]), INPUTS[0] * factor)


SCRIPT = """
import sys, os, torch
from torch import nn
from graphs import capture
from graphs.watch.compiles import CompileWatch
from graphs.store import ArtifactStore, StoredInductor, environment_factors

torch.set_grad_enabled(False)
torch.manual_seed(0)
store = ArtifactStore(sys.argv[1])
built = []

class Watch(CompileWatch):
    def _built(self, what):  # also what is built inside of a compile
        built.append(what)

with store.inductor_cache(environment_factors()) as cache, Watch() as watch:
    os.environ.update(cache.environment)
    backend = StoredInductor(store, cache.seal)
    net = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    graph = capture(net, [torch.ones(2, 4)], backend=backend)
    same = torch.allclose(graph.run(torch.ones(2, 4)), net(torch.ones(2, 4)))
print(backend.stored, backend.loaded, watch.compiles, same, "main.cpp" in str(built))
"""


def test_a_second_process_traces_nothing_and_builds_no_kernel(tmp_path):
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "store")]
    folders = dict.fromkeys(("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"), str(tmp_path))
    for environment, expected in ((folders, "1 0 1 True True"), ({}, "0 1 0 True False")):
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT, env=os.environ | environment
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == expected, done.stderr


def test_cuda_graphs_of_inductor_itself_are_not_stored(store, caplog):
    backend = StoredInductor(store)
    capture(torch.neg, [torch.ones(3)], backend=backend, options={"triton.cudagraphs": True})
    assert backend.stored == 0 and "use backend 'cudagraph'" in caplog.text
