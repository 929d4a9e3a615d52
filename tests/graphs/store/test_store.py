"""Artifacts on disk: what is damaged, foreign or half written is never used."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import resource
import signal
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from graphs.files import digest_of
from graphs.store import ArtifactStore, StoreError, UnsafeStore
from tests.graphs.store.entries import FACTORS, content, entry_of

ROOT = Path(__file__).resolve().parents[3]


def test_a_folder_or_a_file_comes_back_as_it_was_stored(store, artifact, tmp_path):
    assert content(store) is None
    assert store.put(FACTORS, artifact)
    assert content(store) == {"graph.bin": bytes(range(256)) * 40, "deep/notes.json": b"{}"}
    assert store.put({"other": 1}, artifact / "graph.bin")
    assert content(ArtifactStore(store.path), {"other": 1}).keys() == {"graph.bin"}


def test_a_store_is_made_with_the_folders_above_it_for_this_user_only(tmp_path, artifact):
    store = ArtifactStore(tmp_path / "cache" / "mine")
    assert store.put(FACTORS, artifact)
    folders = store.path, *(each for each in store.path.iterdir() if each.is_dir())
    assert len(folders) == 4
    assert {stat.S_IMODE(each.stat().st_mode) for each in folders} == {0o700}


def test_the_factors_are_saved_next_to_the_artifact(store, artifact):
    store.put(FACTORS, artifact)
    manifest = json.loads((entry_of(store) / "manifest.json").read_text())
    assert manifest["factors"] == FACTORS
    assert manifest["digests"]["graph.bin"] == digest_of(artifact / "graph.bin")
    assert store.entries()[0].factors == FACTORS and store.entries()[0].bytes == 10242


@pytest.mark.parametrize(
    "change", [{"torch": "2.14"}, {"cpu": "AVX512"}, {"bucket": {"rows": 8}}, {"threads": 2}]
)
def test_one_other_factor_is_another_artifact(store, artifact, change):
    store.put(FACTORS, artifact)
    assert content(store, FACTORS | change) is None
    assert content(store, dict(reversed(FACTORS.items()))) is not None


def test_storing_again_replaces(store, artifact):
    store.put(FACTORS, artifact)
    (artifact / "graph.bin").write_bytes(b"new")
    assert store.put(FACTORS, artifact)
    assert content(store)["graph.bin"] == b"new" and len(store.entries()) == 1


def test_what_was_not_used_for_longest_is_evicted(tmp_path, artifact):
    store = ArtifactStore(tmp_path / "small", max_bytes=3 * 10242)
    for i in range(3):
        store.put({"i": i}, artifact)
        manifest = entry_of(store, {"i": i}) / "manifest.json"
        os.utime(manifest, (1000 + i, 1000 + i))
    assert content(store, {"i": 0}) is not None  # now 1 is the oldest
    store.put({"i": 3}, artifact)
    assert sorted(entry.factors["i"] for entry in store.entries()) == [0, 2, 3]
    assert store.prune(10242) == 2 * 10242 and store.entries()[0].factors["i"] == 3
    assert store.clear() == 10242 and store.bytes == 0


def test_a_full_store_evicts_at_once_whoever_filled_it(tmp_path, artifact):
    path = tmp_path / "store"
    for limit in (10, 2):
        store = ArtifactStore(path, max_bytes=limit * 10242)
        for i in range(4):
            store.put(FACTORS | {"i": i}, artifact)
        assert len(store.entries()) == min(limit, 4)


def test_most_puts_count_no_sizes(store, artifact, monkeypatch):
    store.put({"i": 0}, artifact)
    counted = []
    monkeypatch.setattr(ArtifactStore, "entries", lambda self: counted.append(self) or [])
    assert all(store.put({"i": i}, artifact) for i in range(1, 4)) and not counted


@pytest.mark.parametrize(("limit", "size"), [(100, 101), (0, 1)])
def test_what_is_larger_than_the_store_is_not_stored(tmp_path, limit, size):
    store = ArtifactStore(tmp_path / "tiny", max_bytes=limit)
    (tmp_path / "graph.bin").write_bytes(bytes(size))
    assert not store.put(FACTORS, tmp_path / "graph.bin")
    assert store.entries() == [] and content(store) is None


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o1777])
def test_a_folder_that_others_can_write_to_is_refused(store, artifact, mode):
    store.put(FACTORS, artifact)
    store.path.chmod(mode)
    with pytest.raises(UnsafeStore, match=r"writable by others .*chmod go-w"):
        ArtifactStore(store.path)
    store.path.chmod(0o700)
    (store.path / "artifacts").chmod(mode)
    with pytest.raises(UnsafeStore, match="artifacts is writable by others"):
        ArtifactStore(store.path)


def test_a_folder_that_others_can_exchange_is_refused_also_behind_a_link(tmp_path):
    open_folder = tmp_path / "open"
    open_folder.mkdir()
    open_folder.chmod(0o777)
    (tmp_path / "link").symlink_to(open_folder / "store")
    for path in (open_folder / "store", tmp_path / "link"):
        with pytest.raises(UnsafeStore, match="open is writable by others"):
            ArtifactStore(path)
    open_folder.chmod(0o1777)  # sticky, as /tmp is: others cannot rename what is ours
    ArtifactStore(open_folder / "store")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_what_belongs_to_another_user_is_refused(store, artifact):
    store.put(FACTORS, artifact)
    os.chown(entry_of(store), 12345, 12345)
    assert content(store) is None
    os.chown(store.path, 12345, 12345)
    with pytest.raises(UnsafeStore, match="belongs to user 12345"):
        ArtifactStore(store.path)


def test_a_disk_that_is_full_stores_nothing_and_breaks_nothing(store, artifact, caplog):
    store.put(FACTORS, artifact)
    (artifact / "graph.bin").write_bytes(b"x" * 200_000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
        assert not store.put(FACTORS, artifact)
        assert not store.put({"other": 1}, artifact)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert "is not stored: [Errno 27] File too large" in caplog.text
    assert len(content(store)["graph.bin"]) == 10240  # what was there before
    assert content(store, {"other": 1}) is None
    assert list((store.path / "unfinished").iterdir()) == []


WRITER = """
import sys
from pathlib import Path
import graphs.store.store as module
from graphs.store import ArtifactStore

def slow(source, target, *_):
    target.mkdir()
    (target / "graph.bin").write_bytes(b"half")
    print("writing", flush=True)
    sys.stdin.read()

module.{name} = slow
factors = {{"torch": "2.13", "bucket": {{"rows": 4}}, "cpu": "AVX2"}}
ArtifactStore(sys.argv[1]).put(factors, sys.argv[2])
"""


@pytest.mark.parametrize("name", ["copy_whole", "write_manifest"])
def test_a_kill_in_mid_write_leaves_nothing_to_load_and_is_cleaned_up(store, artifact, name):
    code = WRITER.format(name=name)
    if name == "write_manifest":
        code = code.replace("target.mkdir()", "target = source")
    command = [sys.executable, "-c", textwrap.dedent(code), str(store.path), str(artifact)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, text=True
    ) as writer:
        assert writer.stdout.readline() == "writing\n"
        unfinished = list((store.path / "unfinished").iterdir())
        assert len(unfinished) == 2
        assert store.put({"other": 1}, artifact)  # a live writer is left alone
        assert set(unfinished) <= set((store.path / "unfinished").iterdir())
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    assert content(store) is None
    assert store.put(FACTORS, artifact)
    assert content(store)["graph.bin"] == bytes(range(256)) * 40
    assert list((store.path / "unfinished").iterdir()) == []


def _hammer(path, seed, results):
    store = ArtifactStore(path, max_bytes=40_000)
    wrong = found = 0
    for i in range(60):
        which = (i * 7 + seed) % 6
        with store.use({"i": which}) as folder:
            if folder is not None:
                found += 1
                wrong += (folder / "graph.bin").read_bytes() != bytes([which]) * 10_000
        source = path.parent / f"from-{seed}"
        source.mkdir(exist_ok=True)
        (source / "graph.bin").write_bytes(bytes([which]) * 10_000)
        store.put({"i": which}, source)
    results.put((found, wrong))


def test_processes_share_a_store_at_once(store):
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    args = [(store.path, seed, results) for seed in range(3)]
    processes = [context.Process(target=_hammer, args=arg) for arg in args]
    for process in processes:
        process.start()
    counts = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert all(found > 0 and wrong == 0 for found, wrong in counts)
    assert store.verify() == {} and store.bytes <= 40_000


def test_nothing_is_removed_while_it_is_used(store, artifact):
    store.put(FACTORS, artifact)
    other = ArtifactStore(store.path, lock_seconds=0.05)
    with store.use(FACTORS) as folder:
        with other.use(FACTORS) as again:  # readers do not wait for each other
            assert again == folder
        with pytest.raises(StoreError, match=r"was locked for 0.05 s"):
            other.clear()
        assert (folder / "graph.bin").exists()
    other.clear()
    assert content(store) is None


def test_what_is_damaged_while_it_is_used_is_discarded_afterwards(store, artifact):
    store.put(FACTORS, artifact)
    other = ArtifactStore(store.path, lock_seconds=0.05)
    with store.use(FACTORS) as folder:
        (folder / "graph.bin").write_bytes(b"damaged")
        with pytest.raises(StoreError, match=r"was locked for 0.05 s"):
            other.verify()
        assert (folder / "graph.bin").exists()
    assert len(other.verify()) == 1 and store.entries() == []


def test_what_is_no_factor_or_no_artifact_is_an_error_at_once(store, artifact, tmp_path):
    with pytest.raises(TypeError):
        store.put({"object": object()}, artifact)
    with pytest.raises(ValueError, match="neither a file nor a folder"):
        store.put(FACTORS, tmp_path / "nothing")
    (artifact / "link").symlink_to("/etc/passwd")
    with pytest.raises(ValueError, match="neither a file nor a folder"):
        store.put(FACTORS, artifact)
    with pytest.raises(ValueError, match="max_bytes is -1"):
        ArtifactStore(tmp_path / "x", max_bytes=-1)
    assert store.entries() == [] and list((store.path / "unfinished").iterdir()) == []


def test_using_an_artifact_notes_when(store, artifact):
    store.put(FACTORS, artifact)
    os.utime(entry_of(store) / "manifest.json", (5, 5))
    assert store.entries()[0].used == 5
    content(store)
    assert store.entries()[0].used > time.time() - 100


@pytest.mark.parametrize(
    "name", [".x.1-2.trash", "artifacts/.x.1-2.trash", "inductor/.x.1-2.trash"]
)
def test_what_killed_processes_left_is_swept_when_a_store_is_opened(store, artifact, name):
    store.put(FACTORS, artifact)
    (store.path / name).mkdir()
    (store.path / name / "file").touch()
    (store.path / "unfinished" / "1-2").mkdir()  # its lock is gone already
    other = ArtifactStore(store.path)
    assert not (store.path / name).exists() and not list((store.path / "unfinished").iterdir())
    assert content(other) is not None


def test_a_store_that_is_in_use_is_opened_without_waiting_and_swept_later(store, artifact):
    store.put(FACTORS, artifact)
    trash = store.path / "artifacts" / ".x.1-2.trash"
    trash.mkdir()
    with store.use(FACTORS):
        ArtifactStore(store.path, lock_seconds=0.0)
        assert trash.exists()
    ArtifactStore(store.path)
    assert not trash.exists()


def test_a_store_that_cannot_be_written_to_is_loaded_from(store, artifact, monkeypatch):
    store.put(FACTORS, artifact)
    opened = os.open

    def read_only(path, flags, *args, **kwargs):
        if flags & (os.O_ACCMODE | os.O_CREAT):
            raise OSError(errno.EROFS, "Read-only file system")
        return opened(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", read_only)
    monkeypatch.setattr("graphs.store.lock._CREATE", read_only)
    other = ArtifactStore(store.path)
    assert content(other) is not None and not other.put({"other": 1}, artifact)


def test_hidden_names_are_no_entries(store, artifact):
    store.put(FACTORS, artifact)
    entry_of(store).rename(store.path / "artifacts" / ".x.1-2.trash")
    assert store.entries() == [] and store.verify() == {} and content(store) is None
