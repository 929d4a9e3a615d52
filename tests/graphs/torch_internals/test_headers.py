"""The headers of C++ kernels: compiled once, concurrently with the first trace of a CPU graph."""

from __future__ import annotations

import pytest
import torch

from graphs import capture
from graphs.store import ArtifactStore, StoredInductor
from graphs.torch_internals import headers

pytestmark = pytest.mark.usefixtures("fresh_compiler", "without_gradients")


@pytest.fixture
def backend(monkeypatch, tmp_path):
    monkeypatch.setattr(headers, "_started", [])
    return StoredInductor(ArtifactStore(tmp_path))


def test_the_probes_end_before_the_compile_and_the_headers_are_those_of_kernels(
    backend, monkeypatch, tmp_path
):
    from torch._inductor import codecache

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setattr(codecache, "_HEADER_DIR", str(tmp_path / "headers"))
    monkeypatch.setattr(codecache, "_HEADER_LOCK_DIR", str(tmp_path / "headers/locks"))
    requested, compiled = [], codecache._precompile_header

    def precompile(*args, **kwargs):
        requested.append(repr((args, kwargs)))
        return compiled(*args, **kwargs)

    monkeypatch.setattr(codecache, "_precompile_header", precompile)
    graph = capture(torch.neg, [torch.ones(2)], backend=backend)
    assert graph.run(torch.ones(2)).tolist() == [-1, -1]
    (started,) = headers._started
    assert started.probed.is_set()
    started.thread.join()
    # Whoever comes first compiles them. None, if an earlier test of this process has.
    assert len({*requested}) == 1 and len([*(tmp_path / "headers").glob("*.h")]) <= 1


def test_they_are_compiled_once_in_a_process(backend, monkeypatch):
    calls = []
    monkeypatch.setattr(headers, "_precompile", lambda: calls.append(1))
    for shift in (1, 2):
        capture(lambda x, shift=shift: x + shift, [torch.ones(2)], backend=backend)
    headers._started[0].thread.join()
    assert len(calls) == 1


def test_a_graph_that_is_loaded_or_traced_only_needs_none(backend, monkeypatch):
    capture(torch.neg, [torch.ones(2)], backend=backend)
    monkeypatch.setattr(headers, "_started", [])
    loaded = capture(torch.neg, [torch.ones(2)], backend=backend)
    capture(torch.neg, [torch.ones(2)], backend="aot_eager")
    assert backend.loaded == 1 and loaded.run(torch.ones(2)).tolist() == [-1, -1]
    assert not headers._started
