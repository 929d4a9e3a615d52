"""A warmup reads source files and globals once for all its buckets, and each warmup anew."""

from __future__ import annotations

from types import MappingProxyType

import pytest
import torch
from torch import nn

from graphs import WarmupManager, capture, explicit
from graphs.backends.cudagraph import CudaGraphBackend
from graphs.capture.contract import Frozen
from graphs.store import ArtifactStore, StoredInductor, sources
from graphs.store.stored import StoredBackend

SPACE = explicit(["rows"], [1, 2, 4])
SCALE, RUNS = 2, 0

pytestmark = pytest.mark.usefixtures("without_gradients")


def scaled(x):
    global RUNS
    RUNS += 1  # a capture changes a global that its own key depends on
    return x * SCALE


class StoredEager(StoredBackend):
    """Stores that it captured a callable, which a loaded graph calls."""

    name = "eager"
    options = MappingProxyType({"options": None})

    def __init__(self, store):
        super().__init__(store, lambda folder, function: Frozen(function))

    def capture(self, job):
        def make(folder):
            (folder / "graph").write_text("")
            return Frozen(job.function).warm_up(job.examples, job.name, 1), lambda: None

        return self.load_or_store(job, self.factors(job), make)


@pytest.fixture
def backend(tmp_path):
    return StoredEager(ArtifactStore(tmp_path / "store"))


@pytest.fixture
def manager(backend):
    return WarmupManager(scaled, SPACE, lambda b: [torch.ones(b.rows)], backend=backend)


def warm(manager):
    """Warm up anew; the numbers of loaded and stored graphs so far."""
    manager.close()
    manager.warmup()
    backend = manager._capturing.spec.backend
    return backend.loaded, backend.stored


def test_a_warmup_reads_once_for_all_its_buckets(manager, backend, monkeypatch):
    reads = []
    for name in ("_reachable", "digest_of_globals"):
        read = getattr(sources, name)

        def count(value, *, name=name, read=read, **options):
            reads.append(name if name == "_reachable" else value.__name__)
            return read(value, **options)

        monkeypatch.setattr(sources, name, count)
    assert warm(manager) == (0, 3)
    assert reads.count("_reachable") == 1
    assert reads.count(__name__) == 2  # for the keys, and for what the captures changed
    assert warm(manager) == (3, 3)
    assert reads.count("_reachable") == 2 and reads.count(__name__) == 4
    for rows in SPACE:
        capture(scaled, [torch.ones(rows.rows)], backend=backend)
    assert reads.count("_reachable") == 5 and reads.count(__name__) == 10


def test_a_change_between_two_warmups_counts_and_one_by_a_capture_does_not(manager, monkeypatch):
    for scale, counts in ((2, (0, 3)), (2, (3, 3)), (3, (3, 6))):
        monkeypatch.setitem(globals(), "SCALE", scale)
        assert warm(manager) == counts


def test_a_change_before_a_warmup_that_reads_other_code_counts_afterwards(manager, monkeypatch):
    backend = manager._capturing.spec.backend
    other = WarmupManager(torch.relu, SPACE, lambda b: [torch.ones(b.rows)], backend=backend)
    assert warm(manager) == (0, 3)
    monkeypatch.setitem(globals(), "SCALE", 3)
    assert warm(other) == (0, 6)
    assert warm(manager) == (0, 9)


class Lazy(nn.Module):
    """Makes a part of another class when it first runs."""

    def __init__(self):
        super().__init__()
        self.part = None

    def forward(self, x):
        self.part = self.part or nn.ReLU()
        return scaled(x)


def test_other_code_that_a_capture_adds_is_read_without_what_captures_changed(backend):
    for counts in ((0, 3), (3, 3)):
        manager = WarmupManager(Lazy(), SPACE, lambda b: [torch.ones(b.rows)], backend=backend)
        assert warm(manager) == counts


def test_a_recording_backend_passes_the_warmup_on(tmp_path):
    inductor = StoredInductor(ArtifactStore(tmp_path / "store"))
    with CudaGraphBackend(inductor=inductor).warming_up():
        assert inductor._digests._known == {}
    assert inductor._digests._known is None
