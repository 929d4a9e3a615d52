"""Entries: damaged ones are discarded and never used; labels describe them in lists."""

import json
import logging
import os
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from graphs.store import key_of
from graphs.store.stored import _model
from tests.graphs.store.entries import FACTORS, content, entry_of


def flip(entry):
    path = entry / "files" / "graph.bin"
    data = bytearray(path.read_bytes())
    data[777] ^= 1
    path.write_bytes(data)


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


def changed(key, value):
    def change(entry):
        path = entry / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))

    return change


def nested(key):
    def change(entry):
        changed(key, "@")(entry)
        path = entry / "manifest.json"
        deep = '{"a":' * 50_000 + "1" + "}" * 50_000
        path.write_text(path.read_text().replace('"@"', deep))

    return change


DAMAGE = {
    "a flipped bit": flip,
    "a truncated file": lambda e: os.truncate(e / "files" / "graph.bin", 100),
    "a missing file": lambda e: (e / "files" / "graph.bin").unlink(),
    "a foreign file": lambda e: (e / "files" / "extra.so").write_bytes(b"x"),
    "a link": link,
    "a pipe": lambda e: os.mkfifo(e / "files" / "pipe"),
    "a truncated manifest": lambda e: os.truncate(e / "manifest.json", 40),
    "no manifest": lambda e: (e / "manifest.json").unlink(),
    "a manifest of another entry": changed("factors", FACTORS | {"cpu": "AVX512"}),
    "a manifest that is a list": lambda e: (e / "manifest.json").write_text("[]"),
    "factors that are nested deeply": nested("factors"),
    "a size that is endless": changed("bytes", float("inf")),
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


def label_of(store):
    (entry,) = store.entries()
    return entry.label


def test_a_label_has_model_name_and_time_and_is_no_part_of_the_key(store, artifact):
    store.put(FACTORS, artifact, about={"model": "Net", "name": "step[rows=4]"})
    label = label_of(store)
    assert (label.model, label.name) == ("Net", "step[rows=4]")
    assert 0 <= time.time() - label.made < 100 and content(store) is not None


@pytest.mark.parametrize(
    "about", [None, [], "x", {"model": 3, "name": ["x"], "made": "now"}, {"made": float("inf")}]
)
def test_a_damaged_label_is_empty_and_the_entry_is_used(store, artifact, about):
    store.put(FACTORS, artifact)
    changed("about", about)(entry_of(store))
    label = label_of(store)
    assert (label.model, label.name, label.made) == ("", "", None)
    assert content(store) is not None


def test_a_label_sends_one_line_of_text_to_a_terminal(store, artifact):
    store.put(FACTORS, artifact)
    changed("about", {"model": "\x1b[2J\ud800\nNet", "name": "x" * 500})(entry_of(store))
    label = label_of(store)
    assert label.model == "?[2J??Net" and len(label.name) == 80


class Wrapped(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.other = nn.GELU()


def test_a_model_is_described_by_its_class_and_its_parameters():
    net = nn.Linear(100, 50)
    assert _model(net) == "Linear, 5.05k parameters"
    assert _model(Wrapped(net)) == "Wrapped of Linear, 5.05k parameters"
    assert _model(nn.GELU()) == "GELU, 0 parameters"
    assert _model(torch.relu) == "relu"
    with torch.device("meta"):
        assert _model(nn.Linear(50_000, 50_000, bias=False)) == "Linear, 2.5B parameters"
