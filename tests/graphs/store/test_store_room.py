"""The room that is left in a store, noted so that not every `put` counts all entries."""

from __future__ import annotations

import pytest

from graphs.store import ArtifactStore
from graphs.store.entry import Entry
from graphs.store.store import Room
from tests.graphs.store.held import FACTORS


def test_room_is_used_up_by_bytes_and_by_entries(tmp_path):
    room = Room(tmp_path / "note", 1000)
    assert not room.take(1)  # nothing was counted yet
    room.counted(900, 3)
    assert room.take(60) and room.take(40) and not room.take(1)
    room.counted(0, 160)
    assert [room.take(0) for _ in range(21)] == [True] * 20 + [False]


@pytest.mark.parametrize("note", ["", "[]", "{", '{"limit": 1000}', '{"limit": 5, "bytes": 9}'])
def test_a_note_that_is_damaged_or_of_another_limit_is_no_room(tmp_path, note):
    (tmp_path / "note").write_text(note)
    assert not Room(tmp_path / "note", 1000).take(1)


def test_what_a_put_reads_does_not_grow_with_the_entries(store, artifact, monkeypatch):
    for i in range(40):
        store.put({"i": i}, artifact)
    read = []
    monkeypatch.setattr(Entry, "read", lambda folder: read.append(folder))
    for i in range(40, 43):
        assert store.put({"i": i}, artifact)
    assert not read


def test_a_full_store_evicts_at_once_whoever_counted_last(tmp_path, artifact):
    path = tmp_path / "store"
    for limit in (10, 2):
        store = ArtifactStore(path, max_bytes=limit * 10242)
        for i in range(4):
            store.put(FACTORS | {"i": i}, artifact)
        assert len(store.entries()) == min(limit, 4)
