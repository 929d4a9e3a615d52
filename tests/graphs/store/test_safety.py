"""Compiled artifacts are code: what someone else could have put there is refused."""

from __future__ import annotations

import os
import sys

import pytest

from graphs.store import ArtifactStore, UnsafeStore
from graphs.store.safety import digests_of_own, open_own

FACTORS = {"cpu": "AVX2"}
OTHER = 12345
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")


@pytest.fixture
def store(tmp_path):
    store = ArtifactStore(tmp_path / "store")
    (tmp_path / "built" / "deep" / "deeper").mkdir(parents=True)
    for name in ("graph.bin", "deep/deeper/notes"):
        (tmp_path / "built" / name).write_bytes(b"code")
    store.put(FACTORS, tmp_path / "built")
    return store


def entry(store):
    return store.entries()[0].folder


@needs_root
@pytest.mark.parametrize(
    "name",
    [".", "files", "manifest.json", "files/graph.bin", "files/deep", "files/deep/deeper/notes"],
)
def test_what_belongs_to_another_user_inside_an_entry_is_refused(store, name, caplog):
    os.chown(entry(store) / name, OTHER, OTHER)
    with store.use(FACTORS) as folder:
        assert folder is None
    assert f"belongs to user {OTHER}, expected 0" in caplog.text and "discarded" in caplog.text
    assert store.entries() == []


@pytest.mark.parametrize("name", [".", "files", "files/deep"])
def test_a_folder_in_an_entry_that_others_can_write_to_is_refused(store, name, caplog):
    (entry(store) / name).chmod(0o777)
    with store.use(FACTORS) as folder:
        assert folder is None
    assert "writable by others (mode 777)" in caplog.text


def test_folders_of_an_entry_are_its_users_alone_whatever_the_umask(tmp_path, store):
    before = os.umask(0)
    try:
        store.put({"other": 1}, tmp_path / "built")
    finally:
        os.umask(before)
    with store.use({"other": 1}) as folder:
        assert folder is not None
        for each in (folder, folder / "deep", folder / "deep" / "deeper", folder.parent):
            assert each.stat().st_mode & 0o777 == 0o700


@needs_root
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_file_is_judged_by_what_was_opened_whatever_its_path_is_then(tmp_path, monkeypatch, when):
    """Someone puts a file of theirs there before the open, or takes it away again after it."""
    path, theirs, mine = tmp_path / "library", tmp_path / "theirs", tmp_path / "mine"
    for each in (path, theirs, mine):
        each.write_bytes(b"code")
    os.chown(theirs, OTHER, OTHER)
    opened = os.open

    def exchanged(*args, **kwargs):
        monkeypatch.undo()
        os.replace(theirs, path)
        handle = opened(*args, **kwargs)
        if when == "after":
            os.replace(mine, path)
        return handle

    monkeypatch.setattr(os, "open", exchanged)
    with pytest.raises(UnsafeStore, match=f"belongs to user {OTHER}"), open_own(path):
        pass


def test_links_pipes_and_folders_are_no_files(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name, reason in (("link", "is a link"), ("pipe", "is neither a file nor a folder")):
        with pytest.raises(UnsafeStore, match=reason), open_own(tmp_path / name):
            pass
    with pytest.raises(IsADirectoryError), open_own(tmp_path / "folder"):
        pass
    with open_own(tmp_path / "file") as file:
        assert file.read() == b""


def test_a_link_to_a_folder_is_not_followed(tmp_path):
    (tmp_path / "top" / "inner").mkdir(parents=True, mode=0o700)
    (tmp_path / "top" / "link").symlink_to("inner")
    with pytest.raises(UnsafeStore, match="link is a link"):
        digests_of_own(tmp_path / "top")


def test_no_descriptor_is_left_open(tmp_path, store):
    if not sys.platform.startswith("linux"):
        pytest.skip("counts descriptors in /proc")
    (tmp_path / "folder").mkdir()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(IsADirectoryError), open_own(tmp_path / "folder"):
            pass
        with store.use(FACTORS) as folder:
            assert folder is not None
        ArtifactStore(store.path)
    assert len(os.listdir("/proc/self/fd")) == before


@needs_root
@pytest.mark.parametrize("name", ["kernel", "inner/kernel", "inner"])
def test_what_belongs_to_another_user_in_a_compile_cache_is_removed(store, name, caplog):
    with store.inductor_cache({}) as cache:
        (cache.files / "inner").mkdir()
        for each in ("kernel", "inner/kernel", "whole"):
            (cache.files / each).write_text("code")
        cache.seal()
    os.chown(cache.files / name, OTHER, OTHER)
    with store.inductor_cache({}) as cache:
        assert not (cache.files / name).exists() and (cache.files / "whole").exists()
    assert f"{name} is discarded" in caplog.text


@needs_root
@pytest.mark.parametrize("name", [".", "files"])
def test_a_compile_cache_of_another_user_is_refused(store, name):
    with store.inductor_cache({}) as cache:
        pass
    os.chown(cache.folder / name, OTHER, OTHER)
    with pytest.raises(UnsafeStore, match=f"belongs to user {OTHER}"), cache:
        pass
    assert f"belongs to user {OTHER}" in store.verify()[cache.key[:12]]
