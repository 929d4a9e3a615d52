"""What files import, kept from one process to the next."""

from __future__ import annotations

import json

import pytest

from graphs.store import imports, known_imports
from graphs.store.imports import parse_source
from graphs.store.known_imports import KnownImports

TEXT = """
import torch
from .near import *
try:
    from fast import run as go
except ImportError:
    go = None

@registered
class Net:
    def forward(self, x):
        import inner
        return inner.f(x, go, "named")
"""


@pytest.fixture
def file(tmp_path):
    file = tmp_path / "net.py"
    file.write_text(TEXT)
    return file


@pytest.fixture
def note(tmp_path):
    return tmp_path / "note.json"


@pytest.fixture
def kept(note, file):
    """A note that a process before has written."""
    known = KnownImports(note)
    known.read("pack.net", file)
    known.keep()
    return note


@pytest.fixture
def parsed(monkeypatch):
    """The packages of texts that are parsed from now on."""
    seen = []

    def parse(package, text):
        seen.append(package)
        return parse_source(package, text)

    monkeypatch.setattr(known_imports, "parse_source", parse)
    return seen


def test_a_later_process_parses_nothing_and_knows_the_same(kept, file, parsed):
    assert KnownImports(kept).read("pack.net", file) == parse_source("pack", TEXT.encode())
    assert parsed == []


@pytest.mark.parametrize("changed", ["text", "package"])
def test_another_text_or_package_is_parsed(kept, file, parsed, changed):
    name = "other.net" if changed == "package" else "pack.net"
    if changed == "text":
        file.write_text(TEXT.replace("inner", "outer"))
    known = KnownImports(kept)
    source = known.read(name, file)
    assert source == parse_source(name.partition(".")[0], file.read_bytes())
    assert parsed == [name.partition(".")[0]]
    known.keep()
    assert KnownImports(kept).read(name, file) == source and len(parsed) == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda note: "",
        lambda note: "[]",
        lambda note: json.dumps({**note, "files": 3}),
        lambda note: json.dumps({**note, "files": {key: [1, 2] for key in note["files"]}}),
        lambda note: json.dumps({**note, "files": {key: [[[3]], {}, []] for key in note["files"]}}),
        lambda note: json.dumps({**note, "reader": "another version of it"}),
    ],
)
def test_a_damaged_note_costs_a_parse_and_is_mended(kept, file, parsed, damage):
    kept.write_text(damage(json.loads(kept.read_text())))
    known = KnownImports(kept)
    assert known.read("pack.net", file) == parse_source("pack", TEXT.encode())
    known.keep()
    assert KnownImports(kept).read("pack.net", file) and parsed == ["pack"]


def test_a_note_that_cannot_be_written_is_none(tmp_path, file):
    known = KnownImports(tmp_path / "nowhere" / "note.json")
    known.read("pack.net", file)
    known.keep()
    assert known.read("pack.net", file) == parse_source("pack", TEXT.encode())


def test_a_note_holds_so_many_files_and_forgets_those_that_were_used_least(
    note, file, parsed, monkeypatch
):
    monkeypatch.setattr(known_imports, "_MOST", 2)
    for names in ("ab", "ac"):
        known = KnownImports(note)
        for name in names:
            known.read(f"{name}.net", file)
        known.keep()
    del parsed[:]
    for name in "acb":
        KnownImports(note).read(f"{name}.net", file)
    assert parsed == ["b"]


def test_what_reads_files_is_told_apart_by_its_own_text(monkeypatch, kept, file, parsed, tmp_path):
    changed = tmp_path / "imports.py"
    changed.write_text("# a reader that finds more")
    monkeypatch.setattr(imports, "__file__", str(changed))
    KnownImports(kept).read("pack.net", file)
    assert parsed == ["pack"]
