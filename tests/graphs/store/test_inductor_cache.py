"""Inductor's own cache is checked before inductor reads it."""

from __future__ import annotations

import os

import pytest

from graphs.store import ArtifactStore


@pytest.fixture
def store(tmp_path):
    return ArtifactStore(tmp_path / "store")


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
        assert f"{name} is thrown away" in caplog.text
    assert "1 files are thrown away: never sealed" in caplog.text


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


def test_verify_checks_the_caches_too(store):
    cache = filled(store, {}, kernel="code")
    (cache.files / "kernel").write_text("c0de")
    assert list(store.verify().values()) == ["it does not have the SHA-256 it was sealed with"]
    assert store.verify() == {}
