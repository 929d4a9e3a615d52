"""The backend that a run gets, and the variables of inductor meanwhile."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import compiled_attn.cli.store
from compiled_attn.cli.errors import UserError
from compiled_attn.cli.store import stored_backend
from graphs.backends.cudagraph import CudaGraphBackend
from graphs.store import StoredAoti, StoredInductor

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def test_inductor_compiles_into_the_store_and_only_during_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, "before")
    with stored_backend("inductor", tmp_path / "store") as backend:
        assert isinstance(backend, StoredInductor)
        assert os.environ[VARIABLE].startswith(str(tmp_path / "store" / "inductor"))
    assert os.environ[VARIABLE] == "before"


def test_other_backends_get_what_they_can_use(tmp_path):
    with stored_backend("aoti", tmp_path / "store") as backend:
        assert isinstance(backend, StoredAoti)
    with stored_backend("cudagraph", tmp_path / "store") as backend:
        assert isinstance(backend, CudaGraphBackend)
        assert os.environ[VARIABLE].startswith(str(tmp_path / "store" / "inductor"))
    with stored_backend("eager", None) as backend:
        assert backend == "eager"
    with pytest.raises(UserError, match="--store is for"), stored_backend("eager", tmp_path):
        pass


def test_a_folder_that_was_asked_for_has_to_work_and_the_default_one_does_not(
    tmp_path, monkeypatch, caplog
):
    tmp_path.chmod(0o777)
    with pytest.raises(UserError, match="writable by others"), stored_backend("aoti", tmp_path):
        pass
    monkeypatch.setattr(compiled_attn.cli.store, "default_store", lambda: tmp_path)
    with stored_backend("aoti", None) as backend:
        assert backend == "aoti"
    assert "nothing is stored for the next start" in caplog.text


def test_a_user_without_a_home_runs_without_a_store(monkeypatch, caplog):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    with stored_backend("inductor", None) as backend:
        assert backend == "inductor"
    assert "Could not determine home directory" in caplog.text
