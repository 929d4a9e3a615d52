"""Entries whose files or manifest are damaged are discarded, and never used."""

import json
import logging
import os
from pathlib import Path

import pytest

from graphs.store import key_of
from tests.graphs.store.entries import FACTORS, content, entry_of


def flip(entry):
    path = entry / "files" / "graph.bin"
    data = bytearray(path.read_bytes())
    data[777] ^= 1
    path.write_bytes(data)


def foreign_manifest(entry):
    path = entry / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["factors"]["cpu"] = "AVX512"
    path.write_text(json.dumps(manifest))


def link(entry):
    path = entry / "files" / "graph.bin"
    path.rename(entry.parent.parent / "elsewhere")
    path.symlink_to(entry.parent.parent / "elsewhere")


def folder_for_manifest(entry):
    (entry / "manifest.json").unlink()
    (entry / "manifest.json").mkdir()


def linked_manifest(entry):
    (entry / "manifest.json").rename(entry / "files" / ".." / "m")
    (entry / "manifest.json").symlink_to("m")


def nested(key):
    def change(entry):
        manifest = json.loads((entry / "manifest.json").read_text())
        manifest[key] = "@"
        text = json.dumps(manifest).replace('"@"', '{"a":' * 50_000 + "1" + "}" * 50_000)
        (entry / "manifest.json").write_text(text)

    return change


def with_bytes(value):
    def change(entry):
        manifest = json.loads((entry / "manifest.json").read_text())
        (entry / "manifest.json").write_text(json.dumps(manifest | {"bytes": value}))

    return change


DAMAGE = {
    "a flipped bit": flip,
    "a truncated file": lambda e: os.truncate(e / "files" / "graph.bin", 100),
    "an empty file": lambda e: os.truncate(e / "files" / "graph.bin", 0),
    "a missing file": lambda e: (e / "files" / "graph.bin").unlink(),
    "a foreign file": lambda e: (e / "files" / "extra.so").write_bytes(b"x"),
    "a link": link,
    "a pipe": lambda e: os.mkfifo(e / "files" / "pipe"),
    "a truncated manifest": lambda e: os.truncate(e / "manifest.json", 40),
    "no manifest": lambda e: (e / "manifest.json").unlink(),
    "a manifest of another entry": foreign_manifest,
    "a manifest that is a list": lambda e: (e / "manifest.json").write_text("[]"),
    "a manifest that is nested deeply": lambda e: (e / "manifest.json").write_text("[" * 100_000),
    "factors that are nested deeply": nested("factors"),
    "digests that are nested deeply": nested("digests"),
    "a size that is endless": with_bytes(float("inf")),
    "a size that is a list": with_bytes([1]),
    "a binary manifest": lambda e: (e / "manifest.json").write_bytes(bytes(range(256))),
    "a manifest that is a folder": folder_for_manifest,
    "a manifest that is a link": linked_manifest,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_damaged_is_discarded_with_a_warning_and_can_be_stored_again(
    store, artifact, damage, caplog
):
    store.put(FACTORS, artifact)
    DAMAGE[damage](entry_of(store))
    with caplog.at_level(logging.WARNING):
        assert content(store) is None
    assert key_of(FACTORS)[:12] in caplog.text and "discarded" in caplog.text
    assert not entry_of(store).exists()
    assert store.put(FACTORS, artifact) and content(store) is not None


def test_verify_finds_and_names_every_damage_and_keeps_the_rest(store, artifact):
    for i, damage in enumerate(DAMAGE.values()):
        store.put({"i": i}, artifact)
        damage(entry_of(store, {"i": i}))
        (store.path / "elsewhere").unlink(missing_ok=True)
    (store.path / "artifacts" / "stranger.so").write_bytes(b"x")
    store.put(FACTORS, artifact)
    problems = store.verify()
    assert len(problems) == len(DAMAGE) + 1 and all(problems.values())
    assert [entry.factors for entry in store.entries()] == [FACTORS]
    assert store.verify() == {}


def test_what_cannot_be_discarded_is_not_used(store, artifact, monkeypatch, caplog):
    store.put(FACTORS, artifact)
    flip(entry_of(store))

    def refuse(self, target):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "rename", refuse)
    assert content(store) is None and content(store) is None
    assert "is not used, and cannot be discarded ([Errno 13] Permission denied)" in caplog.text
