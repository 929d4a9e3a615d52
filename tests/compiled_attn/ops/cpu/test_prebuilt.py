"""Libraries of a wheel: which are taken, where they come to, and what happens if none fits."""

from __future__ import annotations

import json
import logging
import platform
from dataclasses import replace
from pathlib import Path

import pytest

from compiled_attn.ops import paged_attention as loader
from compiled_attn.ops.cpu.build import Build, digests_of
from compiled_attn.ops.cpu.prebuilt import MANIFEST, Manifest, prebuilt
from compiled_attn.ops.schema import SOURCES

FITTING = Manifest("2.11.0", platform.machine(), "linux_any", digests_of(SOURCES))


@pytest.fixture
def packed(tmp_path) -> Path:
    folder = tmp_path / "prebuilt"
    folder.mkdir()
    (folder / "portable.so").write_bytes(b"library")
    FITTING.write(folder)
    return folder


def test_a_library_that_fits_is_copied_to_the_cache(packed, tmp_path):
    made = prebuilt("portable", tmp_path / "cache", packed)
    assert made is not None and made.library.parent == tmp_path / "cache"
    assert made.library.read_bytes() == b"library" and str(made) == "portable, prebuilt"
    before = made.library.stat().st_ino
    again = prebuilt("portable", tmp_path / "cache", packed)
    assert again == made and made.library.stat().st_ino == before
    made.library.write_bytes(b"garbage")
    assert prebuilt("portable", tmp_path / "cache", packed) == made
    assert made.library.read_bytes() == b"library"


def test_without_a_fitting_library_there_is_none(packed, tmp_path):
    assert prebuilt("avx2", tmp_path / "cache", packed) is None
    assert prebuilt("portable", tmp_path / "cache", tmp_path / "nowhere") is None


def test_each_torch_has_a_copy_as_layers_are_measured_against_its_own(
    packed, tmp_path, monkeypatch
):
    first = prebuilt("portable", tmp_path / "cache", packed)
    monkeypatch.setattr("torch.__version__", "98.0")
    second = prebuilt("portable", tmp_path / "cache", packed)
    assert first is not None and second is not None and first.library != second.library


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"machine": "vax"}, "it was built for vax"),
        ({"torch": "99.0.0"}, "it needs torch 99.0.0 or newer"),
        ({"sources": {"op.cpp": "0"}}, "sources have changed"),
    ],
)
def test_libraries_that_do_not_fit_are_left_with_one_line(packed, tmp_path, caplog, changes, why):
    replace(FITTING, **changes).write(packed)
    with caplog.at_level(logging.WARNING, "compiled_attn"):
        assert prebuilt("portable", tmp_path / "cache", packed) is None
        assert prebuilt("portable", tmp_path / "cache", packed) is None
    [said] = [record.getMessage() for record in caplog.records]
    assert why in said and "from source" in said


@pytest.mark.parametrize("text", ["", "[]", "{", json.dumps({"torch": "2.11.0"})])
def test_a_damaged_manifest_is_no_error(packed, tmp_path, caplog, text):
    (packed / MANIFEST).write_text(text)
    with caplog.at_level(logging.WARNING, "compiled_attn"):
        assert prebuilt("portable", tmp_path / "cache", packed) is None
    assert len(caplog.records) == 1


def test_without_a_cache_the_wheels_own_library_is_used(packed, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    made = prebuilt("portable", tmp_path / "file", packed)
    assert made is not None and made.library == packed / "portable.so"


def test_a_library_that_torch_refuses_is_built_from_source_with_one_line(
    tmp_path, monkeypatch, caplog
):
    (bad := tmp_path / "bad.so").write_bytes(b"no library")
    built = Build(tmp_path / "good.so", "portable", 1.0)
    loaded: list[str] = []

    def load_library(path: str) -> None:
        if path == str(bad):
            raise OSError("undefined symbol: torch_new_name")
        loaded.append(path)

    ready = Build(bad, "portable", 0.0, is_prebuilt=True)
    monkeypatch.setattr(loader, "prebuilt", lambda isa: ready)
    monkeypatch.setattr(loader, "build", lambda *_, **__: built)
    monkeypatch.setattr("torch.ops.load_library", load_library)
    with caplog.at_level(logging.WARNING, "compiled_attn"):
        assert loader._load_library("portable", loader.NAMESPACE, {}) is built
    assert loaded == [str(built.library)]
    [said] = [record.getMessage() for record in caplog.records]
    assert "undefined symbol: torch_new_name" in said and "from source" in said


def test_a_variant_is_never_prebuilt(tmp_path, monkeypatch):
    built = Build(tmp_path / "good.so", "portable", 1.0)
    monkeypatch.setattr(loader, "prebuilt", lambda isa: pytest.fail("loads the wheel's"))
    monkeypatch.setattr(loader, "build", lambda *_, **__: built)
    monkeypatch.setattr("torch.ops.load_library", lambda path: None)
    assert loader._load_library("portable", "compiled_attn_portable_address", {}) is built
