"""A miss says why, once."""

from __future__ import annotations

import logging

import pytest
import torch

import graphs.store.factors
from graphs import WarmupManager, capture, explicit
from graphs.capture.contract import Frozen
from graphs.store import StoredInductor
from graphs.store.misses import Misses, differences, nearest

NOW = {
    "backend": "inductor",
    "torch": "2.13",
    "mode": {"threads": "2", "grad": "False"},
    "sources": {"net": "aa", "torch": "2.13"},
    "inputs": ["(4,)"],
    "state": "2 tensors",
    "values": "cc",
}


def stored(store, tmp_path, *all_factors):
    (tmp_path / "graph.bin").write_bytes(b"graph")
    for factors in all_factors:
        store.put(factors, tmp_path / "graph.bin")
    return store.entries()


def test_differences_are_listed_part_by_part():
    old = {**NOW, "torch": "2.12", "mode": {"threads": "4", "grad": "False"}, "gone": 1}
    old["sources"] = {"net": "aa", "onnx": "1.0"}
    assert differences(old, NOW) == {
        "gone": (1, None),
        "mode.threads": ("4", "2"),
        "sources.onnx": ("1.0", None),
        "sources.torch": (None, "2.13"),
        "torch": ("2.12", "2.13"),
    }
    assert differences({"inputs": ["(4,)", "(2,)"]}, NOW | {"inputs": ["(4,)"]})["inputs.1"] == (
        "(2,)",
        None,
    )
    assert differences(NOW, NOW) == {}


def test_of_long_values_the_part_is_shown_where_they_begin_to_differ(store, tmp_path):
    spec = "InputSpec(name='tokens', dtype=torch.int64, device='cpu', shape=({},), rest=1)"
    old = {**NOW, "inputs": [spec.format(16)], "torch": "2.12"}
    text = str(nearest(stored(store, tmp_path, old), {**NOW, "inputs": [spec.format(32)]}, "step"))
    assert "shape=(16,)" in text and "-> ...='cpu', shape=(32,)" in text and "name=" not in text


def test_the_nearest_entry_is_the_same_graph_in_another_environment(store, tmp_path):
    elsewhere = {**NOW, "torch": "2.12", "cpu": "other", "python": "3.11", "values": "dd"}
    other_inputs = {**NOW, "inputs": ["(8,)"]}
    other_backend = {**NOW, "backend": "aoti"}
    entries = stored(store, tmp_path, elsewhere, other_inputs, other_backend)
    miss = nearest(entries, NOW, "step[rows=4]")
    assert set(miss.differs) == {"torch", "cpu", "python", "values"}
    assert not miss.is_another_graph
    assert "torch: 2.12 -> 2.13" in str(miss) and miss.entry[:12] in str(miss)
    assert nearest([], NOW, "step").is_another_graph


def test_long_values_and_long_lists_of_factors_are_shortened(store, tmp_path):
    old = {**NOW, "sources": {f"module_{i}": "x" * 900 for i in range(99)}}
    text = str(nearest(stored(store, tmp_path, old), NOW, "step"))
    assert len(text) < 1000 and "and 95 more" in text


def test_a_reason_is_logged_once_for_all_graphs(store, tmp_path, caplog):
    buckets = [{**NOW, "inputs": [f"({rows},)"]} for rows in range(13)]
    stored(store, tmp_path, *({**factors, "torch": "2.12"} for factors in buckets))
    misses = Misses()
    with caplog.at_level(logging.INFO):
        for rows, factors in enumerate(buckets):
            misses.note(store, factors, f"step[rows={rows}]")
            stored(store, tmp_path, factors)  # as the capture does that follows
    assert len(caplog.records) == 1 and len(misses.found) == 13
    assert caplog.records[0].levelno == logging.WARNING
    assert "step[rows=0]: not in the store" in caplog.text
    assert "differs in torch: 2.12 -> 2.13 (logged once" in caplog.text


def test_a_store_that_has_nothing_like_it_is_no_warning(store, tmp_path, caplog):
    misses = Misses()
    with caplog.at_level(logging.INFO):
        misses.note(store, NOW, "step[rows=4]")
        stored(store, tmp_path, NOW)
        misses.note(store, {**NOW, "inputs": ["(8,)"]}, "step[rows=8]")
        misses.note(store, {**NOW, "inputs": ["(9,)"]}, "step[rows=9]")
    logged = [(record.levelno, record.message) for record in caplog.records]
    assert [level for level, _ in logged] == [logging.INFO] * 2
    assert "no graph of this kind yet" in logged[0][1] and "inputs.0: " in logged[1][1]


@pytest.fixture
def plain(monkeypatch):
    """Inductor that compiles nothing, and artifacts that are one file."""

    def write(self, folder, *_):
        (folder / "graph").write_text("nothing")

    def freeze(job, compiler):
        return Frozen(job.function), None

    monkeypatch.setattr("graphs.store.inductor.freeze", freeze)
    monkeypatch.setattr("graphs.torch_internals.artifacts.ArtifactCompiler.write", write)
    monkeypatch.setattr("graphs.store.inductor.read", lambda folder, function: Frozen(function))


def test_a_warmup_in_another_environment_says_so_in_one_line(store, plain, monkeypatch, caplog):
    def warmup():
        backend = StoredInductor(store)
        buckets = explicit(["rows"], [(rows,) for rows in range(1, 14)])
        manager = WarmupManager(
            torch.relu, buckets, lambda bucket: [torch.ones(bucket.rows)], backend=backend
        )
        report = manager.warmup()
        assert len(report.captured) == 13
        return backend

    warmup()
    caplog.clear()
    assert warmup().misses.found == [] and "not in the store" not in caplog.text
    before = graphs.store.factors.environment_factors
    monkeypatch.setattr(
        "graphs.store.factors.environment_factors", lambda: before() | {"python": "3.99.1"}
    )
    caplog.clear()
    backend = warmup()
    assert len(backend.misses.found) == 13 and backend.loaded == 0
    logged = [record.message for record in caplog.records if "not in the store" in record.message]
    assert len(logged) == 1 and "-> 3.99.1" in logged[0]


def test_what_was_discarded_is_no_miss(store, plain, caplog):
    with torch.no_grad():
        capture(torch.relu, [torch.ones(2)], backend=StoredInductor(store))
        for path in store.entries()[0].files.iterdir():
            path.write_bytes(b"damaged")
        backend = StoredInductor(store)
        caplog.clear()
        capture(torch.relu, [torch.ones(2)], backend=backend)
    assert backend.misses.found == [] and "discarded" in caplog.text
