"""`store.json`: whatever happens to it, the store is the same one afterwards."""

from __future__ import annotations

import json
import logging
import os
import shutil

import pytest

from graphs.store import ArtifactStore, StoreError
from tests.graphs.store.entries import FACTORS, content

NESTED = "[" * 100_000 + "]" * 100_000


@pytest.fixture
def store(store, artifact):
    store.put(FACTORS, artifact)
    return store


def a_folder(marker):
    marker.unlink()
    (marker / "inner").mkdir(parents=True)


def a_link(marker):
    shutil.move(marker, marker.parent.parent / "elsewhere.json")
    marker.symlink_to(marker.parent.parent / "elsewhere.json")


def a_pipe(marker):
    marker.unlink()
    os.mkfifo(marker)


DAMAGE = {
    "missing": lambda marker: marker.unlink(),
    "truncated": lambda marker: os.truncate(marker, 9),
    "binary": lambda marker: marker.write_bytes(bytes(range(256))),
    "nested deeply": lambda marker: marker.write_text(NESTED),
    "a version of 0": lambda m: m.write_text('{"form": "graphs store", "version": 0}'),
    "a form that is a number": lambda marker: marker.write_text('{"form": 1, "version": 1}'),
    "a folder": a_folder,
    "a link": a_link,
    "a pipe": a_pipe,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_marker_is_rewritten_with_a_warning_and_the_entries_stay(store, damage, caplog):
    DAMAGE[damage](store.path / "store.json")
    with caplog.at_level(logging.WARNING):
        healed = ArtifactStore(store.path)
    assert "store.json is damaged" in caplog.text and "is rewritten" in caplog.text
    assert content(healed) is not None
    caplog.clear()
    assert len(ArtifactStore(store.path).entries()) == 1 and not caplog.records


@pytest.mark.skipif(os.getuid() == 0, reason="root can read everything")
def test_a_marker_that_cannot_be_read_is_rewritten(store):
    (store.path / "store.json").chmod(0)
    assert len(ArtifactStore(store.path).entries()) == 1


def test_a_marker_that_the_disk_cannot_read_is_rewritten(store, monkeypatch, caplog):
    opened = os.open

    def broken(path, *args, **kwargs):
        if str(path).endswith("store.json"):
            raise OSError(5, "Input/output error")
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", broken)
    assert len(ArtifactStore(store.path).entries()) == 1
    assert "Input/output error" in caplog.text


@pytest.mark.parametrize("text", ["", "[]", NESTED])
def test_a_damaged_marker_makes_no_store_of_a_folder_that_holds_something_else(tmp_path, text):
    (tmp_path / "store.json").write_text(text)
    (tmp_path / "photo.jpg").write_bytes(b"x")
    with pytest.raises(StoreError, match=r"is not a store, it holds photo.jpg: give an"):
        ArtifactStore(tmp_path)
    assert (tmp_path / "store.json").read_text() == text


def test_a_folder_of_the_same_name_makes_no_store(tmp_path):
    (tmp_path / "artifacts" / "my_build").mkdir(parents=True)
    with pytest.raises(StoreError, match="it holds artifacts/my_build"):
        ArtifactStore(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["artifacts"]


@pytest.mark.parametrize(
    "marker", [{"form": "another program's", "version": 1}, {"form": "graphs store", "version": 2}]
)
def test_a_marker_of_another_program_or_of_a_newer_version_is_left_alone(store, marker):
    (store.path / "store.json").write_text(json.dumps(marker))
    with pytest.raises(StoreError, match=r"holds .*expected .*use another folder"):
        ArtifactStore(store.path)
    assert json.loads((store.path / "store.json").read_text()) == marker


@pytest.mark.parametrize(
    "prepare",
    [lambda marker: None, DAMAGE["truncated"], lambda marker: shutil.rmtree(marker.parent)],
    ids=["open", "heal", "make"],
)
def test_processes_may_open_make_and_heal_a_store_at_once(store, prepare):
    prepare(store.path / "store.json")
    start, pids = os.pipe(), []
    for _ in range(6):
        if not (pid := os.fork()):
            os.read(start[0], 1)
            try:
                ArtifactStore(store.path)
                os._exit(0)
            finally:
                os._exit(1)
        pids.append(pid)
    os.write(start[1], b"x" * 6)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * 6
    assert ArtifactStore(store.path).verify() == {}
