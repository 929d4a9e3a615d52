"""Whenever a process is killed, the entries of its store are whole, and the store works on."""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import signal
import sys

import pytest

from graphs.store import ArtifactStore
from graphs.store.store import _check
from tests.slow import slow_but

SIZE = 3000
_CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.utime"}


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """A store of three entries with two files each, one of them damaged, and a compile cache."""
    folder = tmp_path_factory.mktemp("kills")
    source = folder / "source"
    (source / "deep").mkdir(parents=True)
    (source / "graph.bin").write_bytes(b"g" * 2000)
    (source / "deep" / "notes").write_bytes(b"n" * 1000)
    store = ArtifactStore(folder / "store")
    for number in range(3):
        store.put({"i": number}, source)
    with store.inductor_cache({"cpu": "a"}) as cache:
        (cache.files / "kernel").write_text("code")
        cache.seal()
    return store.path, source


def replace(path, source):
    ArtifactStore(path).put({"i": 1}, source)


def evict(path, source):
    ArtifactStore(path, max_bytes=2 * SIZE).put({"i": 7}, source)


def clear(path, source):
    ArtifactStore(path).clear()


def throw_away(path, source):
    store = ArtifactStore(path)
    entry = store.entries()[0]
    (entry.files / "graph.bin").unlink()
    with store.use(entry.factors) as folder:
        assert folder is None


def compile_cache(path, source):
    with ArtifactStore(path).inductor_cache({"cpu": "b"}) as cache:
        (cache.files / "kernel").write_text("code")
        cache.seal()


WORK = [replace, evict, clear, throw_away, compile_cache]


def killed(work, fatal):
    """Runs `work` in a process of its own that kills itself where `fatal(event)` says so."""
    if not (pid := os.fork()):
        logging.disable()

        def watch(event, args):
            writes = event == "open" and isinstance(args[2], int) and args[2] & os.O_ACCMODE
            if (event in _CHANGES or writes) and fatal():
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(watch)
        try:
            work()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


def hidden(path):
    return [each for each in path.rglob(".*") if each.name != ".lock"]


def assert_whole(path, *, except_damaged=False):
    """What is there by a name that is not hidden is whole: before anyone tidied up."""
    folders = [f for f in (path / "artifacts").iterdir() if not f.name.startswith(".")]
    problems = [problem for folder in folders if (problem := _check(folder)[1])]
    if except_damaged:  # the test itself took that file away
        problems = [
            p for p in problems if p != "its files are not those of its manifest: graph.bin"
        ]
    assert problems == []
    for cache in (path / "inductor").glob("[!.]*"):
        assert (cache / "files").is_dir() or not list(cache.glob("*.json"))


def assert_goes_on(path, source):
    """The next process finds everything usable, and nothing left over."""
    store = ArtifactStore(path, lock_seconds=0.2)
    assert list((path / "unfinished").iterdir()) == []
    store.verify()
    assert hidden(path) == []
    assert store.put({"i": "next"}, source)
    with store.use({"i": "next"}) as folder:
        assert (folder / "graph.bin").read_bytes() == b"g" * 2000
    store.clear()
    assert store.entries() == [] and store.inductor_caches() == []


@pytest.mark.parametrize("work", slow_but((replace, compile_cache, throw_away), WORK))
def test_a_kill_at_any_change_of_the_disk_leaves_entries_whole_or_not_there(
    work, template, tmp_path
):
    path, source = template
    for last in itertools.count(1):
        shutil.rmtree(tmp_path / "store", ignore_errors=True)
        shutil.copytree(path, tmp_path / "store")
        events = itertools.count(1)
        was_killed = killed(
            lambda: work(tmp_path / "store", source),
            lambda events=events, last=last: next(events) == last,
        )
        assert_whole(tmp_path / "store", except_damaged=work is throw_away)
        assert_goes_on(tmp_path / "store", source)
        if not was_killed:
            break
    assert last > 5
