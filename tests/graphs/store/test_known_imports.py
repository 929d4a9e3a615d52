"""What files import, kept from one process to the next."""

from __future__ import annotations

import pytest

from graphs.errors import UnsafeStore
from graphs.store import ArtifactStore, imports, known_imports
from graphs.store.imports import SourceFile, parse_source
from graphs.store.known_imports import KnownImports
from graphs.store.lock import locked

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
def store(tmp_path):
    return ArtifactStore(tmp_path / "store").path


@pytest.fixture
def kept(store, file):
    """A store with a note that a process before has written."""
    known = KnownImports(store)
    known.read("pack.net", file)
    known.keep()
    assert (store / ".imports").is_file()
    return store


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
        lambda note: b"",
        lambda note: note[:-1],
        lambda note: note.replace(b"torch", b"torcg"),
        lambda note: b"another version of it " + note.split(b" ")[1],
        lambda note: note.partition(b"\n")[0] + b"\n[]",
    ],
)
def test_a_damaged_note_costs_a_parse_and_is_mended(kept, file, parsed, damage):
    note = kept / ".imports"
    note.write_bytes(damage(note.read_bytes()))
    known = KnownImports(kept)
    assert known.read("pack.net", file) == parse_source("pack", TEXT.encode())
    known.keep()
    assert KnownImports(kept).read("pack.net", file) and parsed == ["pack"]


def test_a_note_that_others_may_have_written_is_none(kept, file, parsed, monkeypatch):
    def refuse(path):
        raise UnsafeStore(f"{path} belongs to user 1")

    monkeypatch.setattr(known_imports, "open_own", refuse)
    KnownImports(kept).read("pack.net", file)
    assert parsed == ["pack"]


def test_a_link_in_its_place_is_not_read(kept, file, parsed, tmp_path):
    (kept / ".imports").rename(tmp_path / "elsewhere")
    (kept / ".imports").symlink_to(tmp_path / "elsewhere")
    KnownImports(kept).read("pack.net", file)
    assert parsed == ["pack"]


def test_a_note_that_cannot_be_written_is_none(tmp_path, file):
    known = KnownImports(tmp_path / "nowhere")
    known.read("pack.net", file)
    known.keep()
    assert known.read("pack.net", file) == parse_source("pack", TEXT.encode())


def test_a_store_that_is_busy_costs_the_note(store, file, monkeypatch):
    monkeypatch.setattr(known_imports, "_PATIENCE_SECONDS", 0.0)
    known = KnownImports(store)
    known.read("pack.net", file)
    with locked(store / ".lock", shared=True, seconds=1.0):
        known.keep()
    assert not (store / ".imports").exists()


def test_processes_that_write_at_once_lose_nothing(store, file, parsed):
    one, other = KnownImports(store), KnownImports(store)
    one.read("a.net", file), other.read("b.net", file)
    one.keep(), other.keep()
    del parsed[:]
    for name in ("a.net", "b.net"):
        KnownImports(store).read(name, file)
    assert parsed == []


def test_what_cannot_be_parsed_now_is_tried_by_the_next_process(store, file, parsed):
    file.write_text("def broken(:\n")
    for _ in range(2):
        known = KnownImports(store)
        assert known.read("pack.net", file) == SourceFile()
        known.keep()
    assert parsed == ["pack"] * 2


def test_a_note_holds_so_many_files_and_forgets_those_that_were_used_least(
    store, file, parsed, monkeypatch
):
    monkeypatch.setattr(known_imports, "_MOST", 2)
    for names in ("ab", "ac"):
        known = KnownImports(store)
        for name in names:
            known.read(f"{name}.net", file)
        known.keep()
    del parsed[:]
    for name in "acb":
        KnownImports(store).read(f"{name}.net", file)
    assert parsed == ["b"]


def test_what_reads_files_is_told_apart_by_its_own_text(monkeypatch, kept, file, parsed, tmp_path):
    changed = tmp_path / "imports.py"
    changed.write_text("# a reader that finds more")
    monkeypatch.setattr(imports, "__file__", str(changed))
    KnownImports(kept).read("pack.net", file)
    assert parsed == ["pack"]
