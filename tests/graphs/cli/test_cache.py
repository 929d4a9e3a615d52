"""`cache ls|verify|prune|clear`, as both programs offer it."""

from __future__ import annotations

import json
import os
import re
import time

import pytest

import compiled_attn.cli.app
from graphs.cli.cache import cache_app, parse_bytes
from graphs.cli.errors import UserError
from graphs.store import ArtifactStore


@pytest.fixture
def store(tmp_path):
    (tmp_path / "graph.bin").write_bytes(b"x" * 1000)
    store = ArtifactStore(tmp_path / "store")
    store.put({"backend": "inductor", "name": "step[rows=4]"}, tmp_path / "graph.bin")
    store.put({"backend": "aoti", "threads": 2}, tmp_path / "graph.bin")
    return store


@pytest.fixture(params=["graphs", "compiled-attn"])
def call(request):
    app, first = cache_app("unused"), []
    if request.param == "compiled-attn":
        app, first = compiled_attn.cli.app.app, ["cache"]
    return lambda *arguments: app(args=[*first, *map(str, arguments)], standalone_mode=False)


def test_ls_lists_what_is_there_and_why(store, call, capsys):
    assert not call("ls", "--store", store.path)
    out = capsys.readouterr().out
    assert "inductor step[rows=4]" in out and "aoti" in out and "threads" not in out
    call("ls", "--factors", "--store", store.path)
    assert "    threads: 2" in capsys.readouterr().out


def test_ls_names_model_graph_backend_age_size_and_last_use(store, call, capsys, tmp_path):
    about = {"model": "PagedCausalLM of LlamaForCausalLM, 5M parameters", "name": "step[rows=8]"}
    store.put({"backend": "inductor", "i": 1}, tmp_path / "graph.bin", about=about)
    (old,) = (entry for entry in store.entries() if entry.factors.get("threads"))
    manifest = json.loads((old.folder / "manifest.json").read_text())
    (old.folder / "manifest.json").write_text(json.dumps(manifest | {"about": None}))
    os.utime(old.folder / "manifest.json", (time.time() - 5 * 86400,) * 2)
    call("ls", "--store", store.path)
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split("  ")[0] == "entry" and len(lines) == 4
    columns = [re.split(r"  +", line) for line in (head, *lines[:3])]
    assert columns[0] == ["entry", "size", "age", "last used", "model", "backend, graph and bucket"]
    shown = {line[5]: line[1:5] for line in columns[1:]}
    size, age, used, model = shown["inductor step[rows=8]"]
    assert (size, model) == ("0.0 MiB", about["model"])
    assert age.endswith(" s") and used.endswith(" s")
    assert shown["aoti -"] == ["0.0 MiB", "-", "5 d", "-"]


def test_ls_finds_the_store_by_itself(store, capsys):
    app = cache_app("~/.cache/somewhere", find=lambda: store.path)
    assert not app(args=["ls"], standalone_mode=False)
    assert str(store.path) in capsys.readouterr().out


def test_ls_heals_a_store_without_a_marker(store, call, capsys):
    (store.path / "store.json").unlink()
    assert not call("ls", "--store", store.path)
    assert "inductor step[rows=4]" in capsys.readouterr().out


def test_verify_discards_what_is_damaged_and_says_so(store, call, capsys):
    assert not call("verify", "--store", store.path)
    assert "2 intact, 0 damaged" in capsys.readouterr().out
    (store.entries()[0].files / "graph.bin").write_bytes(b"y" * 1000)
    assert call("verify", "--store", store.path) == 1
    out = capsys.readouterr().out
    assert "SHA-256 of its manifest; discarded" in out and "1 intact, 1 damaged" in out


def test_prune_and_clear_remove(store, call, capsys):
    call("prune", "--max-size", "1K", "--store", store.path)
    assert len(store.entries()) == 1
    call("clear", "--store", store.path)
    assert store.entries() == [] and "0.0 MiB left" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["ls"], ["verify"], ["clear"], ["prune", "--max-size", "0"]])
def test_a_folder_without_a_store_is_an_error_and_nothing_is_made(command, call, tmp_path):
    with pytest.raises(UserError, match=r"no store in .*--store DIR"):
        call(*command, "--store", tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("text", "size"), [("0", 0), ("12", 12), ("2K", 2048), ("3mb", 3 << 20), ("1G", 1 << 30)]
)
def test_a_size_is_read_with_its_unit(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "-1", "x", "1T", "1.5G"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="expected a size such as"):
        parse_bytes(text)
