"""The store of an engine's configuration."""

from __future__ import annotations

import os

import pytest

from compiled_attn.engine import EngineConfig, graph_store
from compiled_attn.engine.graph_store import store_of
from compiled_attn.errors import ConfigError
from graphs.backends.eager import EagerBackend
from graphs.store import StoredAoti, StoredInductor

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


@pytest.mark.parametrize("store", [None, False])
def test_an_engine_by_itself_has_no_store(store):
    assert store_of("inductor", store).backend == "inductor"


def test_a_folder_is_used_and_only_while_graphs_are_captured(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    stored = store_of("inductor", str(tmp_path / "store"))
    assert isinstance(stored.backend, StoredInductor)
    with stored.capturing():
        assert os.environ[VARIABLE].startswith(str(tmp_path / "store" / "inductor"))
    assert VARIABLE not in os.environ
    stored.close()
    assert isinstance(store_of("aoti", tmp_path / "store").backend, StoredAoti)


def test_a_backend_object_brings_its_own_store():
    backend = EagerBackend()
    assert store_of(backend, True).backend is backend
    assert store_of(backend, "folder").backend is backend


def test_a_folder_that_was_asked_for_has_to_work_and_the_default_one_does_not(
    tmp_path, monkeypatch, caplog
):
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="writable by others"):
        store_of("aoti", tmp_path)
    with pytest.raises(ConfigError, match="with a store, got 'eager': leave one of them out"):
        store_of("eager", tmp_path)
    monkeypatch.setattr(graph_store, "default_store", lambda: tmp_path)
    assert store_of("aoti", True).backend == "aoti"
    assert store_of("eager", True).backend == "eager"
    assert "nothing is stored for the next start" in caplog.text


@pytest.mark.parametrize("name", ["my store", "it's", 'a"b', "a\\b", "tab\there"])
def test_a_folder_whose_name_inductor_would_split_is_refused_before_it_is_made(
    tmp_path, monkeypatch, caplog, name
):
    folder = tmp_path / name / "store"
    with pytest.raises(ConfigError, match="without spaces, quotes and backslashes") as error:
        store_of("inductor", folder)
    assert "\n" not in str(error.value) and not folder.exists()
    assert isinstance(store_of("aoti", folder).backend, StoredAoti)
    monkeypatch.setattr(graph_store, "default_store", lambda: folder)
    assert store_of("inductor", True).backend == "inductor"
    assert "nothing is stored for the next start: expected a store in a folder" in caplog.text


def test_without_a_torch_that_can_store_the_default_store_is_left_out(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(graph_store, "default_store", lambda: tmp_path / "store")
    monkeypatch.setattr(StoredInductor, "available", lambda self: "this torch cannot store")
    assert store_of("inductor", True).backend == "inductor"
    assert "nothing is stored for the next start: this torch cannot store" in caplog.text


def test_what_is_no_folder_is_refused():
    with pytest.raises(ConfigError, match="expected store as True, False or a folder, got 3"):
        EngineConfig(store=3)
