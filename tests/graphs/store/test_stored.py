"""Graphs that cannot be loaded or stored are compiled, with a reason in the log."""

from __future__ import annotations

import pytest
import torch

from graphs import CaptureError, capture
from graphs.capture.contract import CaptureSpec, Job
from graphs.store import ArtifactStore, StoredInductor, stored
from graphs.store.factors import environment_factors
from graphs.torch_internals import artifacts
from tests.graphs.store.test_inductor_symbolic import SPACE, Net, expect_the_same, warm

NO_IMAGE = "CUDA error: no kernel image is available for execution on the device"
INPUTS = [torch.randn(3, 4)]

pytestmark = pytest.mark.usefixtures("without_gradients")


@pytest.fixture
def store(tmp_path):
    return ArtifactStore(tmp_path / "store")


def captured(store):
    """A captured graph that works; how many were loaded and stored."""
    backend = StoredInductor(store)
    graph = capture(torch.relu, INPUTS, backend=backend)
    assert torch.equal(graph.run(*INPUTS), INPUTS[0].relu())
    return backend.loaded, backend.stored


@pytest.fixture
def refused(monkeypatch):
    """Kernels of stored graphs are loaded, and then rejected by the device."""

    def refuse(tensors):
        raise RuntimeError(NO_IMAGE)

    def switch(on: bool) -> None:
        monkeypatch.undo()
        if on:
            monkeypatch.setattr(artifacts, "_load", lambda path: refuse)

    return switch


def test_a_stored_graph_whose_kernels_the_device_rejects_is_compiled_again(store, refused, caplog):
    assert captured(store) == (0, 1)
    refused(True)
    assert captured(store) == (0, 1)
    assert "compiling again, the loaded graph fails: relu: " in caplog.text
    assert NO_IMAGE in caplog.text
    refused(False)
    assert captured(store) == (1, 0)


def test_so_is_one_of_symbolic_sizes(store, refused, caplog):
    for is_refused, counts in ((False, (0, 1)), (True, (0, 1)), (False, (1, 0))):
        refused(is_refused)
        backend, manager, report = warm(store, module := Net())
        assert (backend.loaded, backend.stored) == counts
        assert len(report.captured) == len(SPACE)
        expect_the_same(manager, module)
    assert caplog.text.count(NO_IMAGE) == 1 and len(store.entries()) == 1


def test_guards_that_this_torch_cannot_check_do_not_hold():
    assert artifacts._why_not({"guards": ["L['inputs'][0].size()[0] > 1"]}, INPUTS) == ""
    for guard in ("unknown(1)", "L['inputs'][7].size()[0] == 2"):
        why = artifacts._why_not({"guards": [guard]}, INPUTS)
        assert why.startswith(f"{guard} cannot be checked: ")


def test_what_inductor_cannot_store_is_compiled_all_the_same(store, monkeypatch, caplog):
    def fail(*_, **options):
        raise NotImplementedError("no standalone graph of this device")

    monkeypatch.setattr(torch._inductor, "standalone_compile", fail)
    assert captured(store) == (0, 0)
    assert "relu: not stored: NotImplementedError: no standalone graph" in caplog.text
    backend, manager, report = warm(store, module := Net())
    assert len(report.captured) == len(SPACE) and (backend.loaded, backend.stored) == (0, 0)
    expect_the_same(manager, module)


def test_what_fails_either_way_is_an_error_of_the_capture(store):
    def breaks(x):
        torch._dynamo.graph_break()
        return x + 1

    with pytest.raises(CaptureError, match="graph break"):
        capture(breaks, INPUTS, backend=StoredInductor(store))


def test_a_key_that_cannot_be_computed_is_a_reason(store, monkeypatch, caplog):
    def fail(*_, **options):
        raise AttributeError("module 'torch._inductor.config' has no attribute 'get_hash'")

    monkeypatch.setattr(stored, "graph_factors", fail)
    assert captured(store) == (0, 0)
    assert "not stored: cannot compute the cache key: AttributeError" in caplog.text
    backend = StoredInductor(store)
    assert not backend.has(Job(torch.relu, INPUTS, CaptureSpec(backend)))


def test_a_graph_that_cannot_be_written_is_used(store, monkeypatch, caplog):
    def fail(*_, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(artifacts.ArtifactCompiler, "write", fail)
    assert captured(store) == (0, 0)
    assert "not stored: OSError" in caplog.text


def test_kernels_of_another_triton_are_others(monkeypatch):
    from graphs.store import factors

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: "H100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: (9, 0))
    seen = set()
    for version in ("3.6.0", "3.9.0"):
        monkeypatch.setattr(factors, "version_of", lambda name, v=version: f"{v} of {name}")
        seen.add(str(environment_factors()["accelerators"]))
    assert len(seen) == 2 and all("of triton" in each for each in seen)
