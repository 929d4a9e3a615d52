"""`store.json`: whatever happens to it, the store is the same one afterwards."""

from __future__ import annotations

import json
import logging
import os
import shutil

import pytest

from graphs.store import ArtifactStore, StoreError

FACTORS = {"cpu": "AVX2"}
NESTED = "[" * 100_000 + "]" * 100_000


@pytest.fixture
def store(tmp_path):
    store = ArtifactStore(tmp_path / "store")
    (tmp_path / "graph.bin").write_bytes(b"graph")
    store.put(FACTORS, tmp_path / "graph.bin")
    return store


def a_folder(mark):
    mark.unlink()
    (mark / "inner").mkdir(parents=True)


def a_link(mark):
    shutil.move(mark, mark.parent.parent / "elsewhere.json")
    mark.symlink_to(mark.parent.parent / "elsewhere.json")


def a_pipe(mark):
    mark.unlink()
    os.mkfifo(mark)


DAMAGE = {
    "missing": lambda mark: mark.unlink(),
    "empty": lambda mark: mark.write_text(""),
    "truncated": lambda mark: os.truncate(mark, 9),
    "binary": lambda mark: mark.write_bytes(bytes(range(256))),
    "nested deeply": lambda mark: mark.write_text(NESTED),
    "nested objects": lambda mark: mark.write_text('{"a":' * 50_000),
    "a list": lambda mark: mark.write_text("[1]"),
    "null": lambda mark: mark.write_text("null"),
    "no version": lambda mark: mark.write_text('{"form": "graphs store"}'),
    "a version that is text": lambda mark: mark.write_text(
        '{"form": "graphs store", "version": "1"}'
    ),
    "a version that is none": lambda mark: mark.write_text(
        '{"form": "graphs store", "version": 0}'
    ),
    "a form that is a number": lambda mark: mark.write_text('{"form": 1, "version": 1}'),
    "a folder": a_folder,
    "a link": a_link,
    "a pipe": a_pipe,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_marker_is_rewritten_with_a_warning_and_the_entries_stay(store, damage, caplog):
    DAMAGE[damage](store.path / "store.json")
    with caplog.at_level(logging.WARNING):
        healed = ArtifactStore(store.path)
    assert "store.json is " in caplog.text and "rewritten; 1 entries are there" in caplog.text
    with healed.use(FACTORS) as folder:
        assert (folder / "graph.bin").read_bytes() == b"graph"
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
    "mark", [{"form": "another program's", "version": 1}, {"form": "graphs store", "version": 2}]
)
def test_a_marker_of_another_program_or_of_a_newer_version_is_left_alone(store, mark):
    (store.path / "store.json").write_text(json.dumps(mark))
    with pytest.raises(StoreError, match=r"holds .*expected .*use another folder"):
        ArtifactStore(store.path)
    assert json.loads((store.path / "store.json").read_text()) == mark


@pytest.mark.parametrize(
    "prepare",
    [lambda mark: None, DAMAGE["truncated"], lambda mark: shutil.rmtree(mark.parent)],
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
