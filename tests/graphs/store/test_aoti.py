"""Packages of AOTInductor that a later capture loads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from graphs import capture
from graphs.backends.aoti import AotiBackend
from graphs.capture.contract import Frozen
from graphs.store import ArtifactStore, StoredAoti
from graphs.watch.compiles import CompileWatch


@pytest.mark.slow
def test_a_package_is_built_once_and_then_loaded_without_a_compiler(tmp_path):
    net, x = nn.Linear(4, 4).eval(), torch.randn(2, 4)
    store = ArtifactStore(tmp_path / "store")
    with torch.no_grad():
        first = capture(net, [x], backend=StoredAoti(store))
        backend = StoredAoti(store)
        with CompileWatch() as watch:
            second = capture(net, [x], backend=backend)
        assert (backend.loaded, backend.stored, watch.events) == (1, 0, ())
        net.weight.mul_(2)
        torch.testing.assert_close(first.run(x), net(x))
        torch.testing.assert_close(second.run(x), net(x))


def test_what_is_no_package_is_built_again(tmp_path, monkeypatch, caplog):
    """With a backend that builds nothing, to be quick."""
    monkeypatch.setattr(AotiBackend, "capture", _pretend)
    store = ArtifactStore(tmp_path / "store")
    for _ in range(2):
        backend = StoredAoti(store)
        capture(torch.relu, [torch.ones(2)], backend=backend)
        assert (backend.loaded, backend.stored) == (0, 1)
    assert "compiling again, not loaded" in caplog.text


def _pretend(self, job):
    Path(job.options["package_path"], "graph.pt2").write_bytes(b"no package")
    return Frozen(job.function)
