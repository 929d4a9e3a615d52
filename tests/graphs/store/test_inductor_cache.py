"""Inductor's own cache is checked before inductor reads it."""

from __future__ import annotations

import os
import sys

from graphs.store import InductorCache
from graphs.store.lock import Lock


def filled(store, factors, **files):
    with store.inductor_cache(factors) as cache:
        for name, text in files.items():
            (cache.files / name).write_text(text)
        cache.seal()
    return cache


def names(cache):
    return sorted(path.name for path in cache.files.iterdir())


def test_what_was_sealed_is_there_in_the_next_process(store):
    filled(store, {"cpu": "a"}, kernel="code", other="more")
    with store.inductor_cache({"cpu": "a"}) as cache:
        assert names(cache) == ["kernel", "other"] and cache.seal() == 0
        assert cache.environment == {"TORCHINDUCTOR_CACHE_DIR": str(cache.files)}


def test_another_environment_has_another_cache(store):
    filled(store, {"cpu": "a"}, kernel="code")
    with store.inductor_cache({"cpu": "b"}) as cache:
        assert names(cache) == []
    assert len(store.inductor_caches()) == 2


def test_what_was_changed_cut_linked_or_never_sealed_is_removed(store, caplog, tmp_path):
    cache = filled(store, {}, changed="code", cut="code", linked="code", whole="code")
    (cache.files / "changed").write_text("c0de")
    os.truncate(cache.files / "cut", 2)
    (cache.files / "linked").rename(tmp_path / "linked")
    (cache.files / "linked").symlink_to(tmp_path / "linked")
    (cache.files / "left_by_a_kill").write_text("half")
    with store.inductor_cache({}) as cache:
        assert names(cache) == ["whole"]
    for name in ("changed", "cut", "linked"):
        assert f"{name} is discarded" in caplog.text
    assert "1 files are discarded: never sealed" in caplog.text


def test_a_seal_that_is_damaged_vouches_for_nothing(store):
    cache = filled(store, {}, kernel="code")
    os.truncate(cache.folder / "sealed.json", 5)
    with store.inductor_cache({}) as cache:
        assert names(cache) == []


def test_what_another_process_is_writing_is_left_alone(store):
    with store.inductor_cache({}) as first:
        (first.files / "kernel").write_text("code")
        with store.inductor_cache({}) as second:
            assert names(second) == ["kernel"]
            assert store.clear() == 0  # in use
        first.seal()
    with store.inductor_cache({}) as third:
        assert names(third) == ["kernel"]
    assert store.clear() > 0 and store.inductor_caches() == []


def test_processes_that_seal_at_once_lose_nothing(store):
    count, pids = 4, []
    with store.inductor_cache({}) as cache:
        for process in range(count):
            if not (pid := os.fork()):
                for number in range(15):
                    (cache.files / f"{process}-{number}").write_text("code")
                    cache.seal()
                os._exit(0)
            pids.append(pid)
        for pid in pids:
            assert os.waitpid(pid, 0)[1] == 0
    with store.inductor_cache({}) as cache:
        assert len(names(cache)) == 15 * count


def test_a_file_that_another_process_sealed_half_written_is_sealed_again(store):
    with store.inductor_cache({}) as writer, store.inductor_cache({}) as other:
        (writer.files / "kernel").write_text("co")
        assert other.seal() == 1
        (writer.files / "kernel").write_text("code")
        assert writer.seal() == 1
    with store.inductor_cache({}) as cache:
        assert names(cache) == ["kernel"]


def test_a_file_that_was_sealed_half_written_is_sealed_again(store):
    with store.inductor_cache({}) as cache:
        (cache.files / "kernel").write_text("co")
        assert cache.seal() == 1
        (cache.files / "kernel").write_text("code")
        assert cache.seal() == 1 and cache.seal() == 0
    with store.inductor_cache({}) as cache:
        assert names(cache) == ["kernel"]


def test_a_temporary_file_that_vanishes_does_not_keep_others_from_being_sealed(store, monkeypatch):
    module = sys.modules["graphs.store.inductor_cache"]
    listed = module._names_in
    monkeypatch.setattr(module, "_names_in", lambda folder: ["gone.tmp", *listed(folder)])
    with store.inductor_cache({}) as cache:
        (cache.files / "kernel").write_text("code")
        assert cache.seal() == 1


def test_a_cache_that_is_cleared_while_it_is_opened_is_created_again(store, monkeypatch):
    cache, scrub = store.inductor_cache({"cpu": "a"}), InductorCache.scrub

    def cleared(self):
        scrub(self)
        monkeypatch.undo()
        waiting = Lock(cache.folder / "lock")
        assert InductorCache(cache.folder).clear() > 0 and not waiting.is_current()
        waiting.close()
        return {}

    monkeypatch.setattr(InductorCache, "scrub", cleared)
    (cache.files / "old").write_text("code")
    cache.seal()
    with cache:
        assert names(cache) == [] and (cache.folder / "factors.json").exists()
        assert store.clear() == 0  # its lock is the one that others see


def test_verify_checks_the_caches_too(store):
    cache = filled(store, {}, kernel="code")
    (cache.files / "kernel").write_text("c0de")
    assert list(store.verify().values()) == ["it does not have the SHA-256 it was sealed with"]
    assert store.verify() == {}
