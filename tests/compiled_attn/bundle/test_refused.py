"""Bundles that cannot be served, by ``compiled-attn serve --bundle``: one line, exit code 2."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="needs the extra cli")

from compiled_attn.bundle import folder
from compiled_attn.cli import main
from tests.compiled_attn.bundle.signed import change_manifest


@pytest.fixture
def copy(written, tmp_path):
    return shutil.copytree(written.folder, tmp_path / "copy")


def _flip(path: Path) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))


def _link(path: Path) -> None:
    path.rename(path.parent.parent / path.name)
    path.symlink_to(path.parent.parent / path.name)


DAMAGES = {
    "changed byte": (lambda path: _flip(path / "graphs.bin"), "graphs.bin as it was written"),
    "changed manifest": (lambda path: _flip(path / folder.MANIFEST), "manifest.json as it was"),
    "missing": (lambda path: (path / "graphs.json").unlink(), "graphs.json cannot be read: No"),
    "no manifest": (lambda path: (path / folder.MANIFEST).unlink(), "none with manifest.json"),
    "link": (lambda path: _link(path / "library_0.so"), "neither a file nor a folder"),
    "outside": (lambda path: change_manifest(path, libraries=["../x.so"]), "folder, got '../x.so'"),
    "processor": (lambda path: change_manifest(path, features=["avx9"]), "with avx9, got one"),
    "machine": (lambda path: change_manifest(path, machine="riscv64"), "kind riscv64, got"),
    "version": (lambda path: change_manifest(path, version="0.0"), "compiled_attn 0.0, got"),
    "torch": (lambda path: change_manifest(path, torch="1.0"), "torch 1.0, got"),
    "format": (lambda path: change_manifest(path, format=3), "format 2, got 3"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_a_bundle_that_cannot_be_used_is_refused_at_once(copy, capsys, name):
    damage, words = DAMAGES[name]
    damage(copy)
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--bundle", str(copy)])
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and words in line
    assert line.startswith(f"compiled-attn: error: bundle {copy}: ")


def test_a_model_to_compile_is_refused_at_once_where_the_bundle_does_not_fit(copy, capsys):
    change_manifest(copy, torch="1.0")
    with pytest.raises(SystemExit) as ended:
        main(["serve", str(copy / "none"), "--bundle", str(copy), "--or-compile", "--no-store"])
    *_, line = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and line.startswith("compiled-attn: error: model ")
    assert f"{copy}/none: no such directory" in line


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: _flip(path / folder.WEIGHTS), "weights.bin as it was written"),
        (lambda path: change_manifest(path, isa="neon"), "a processor with neon, got one"),
        (lambda path: change_manifest(path, engine={}), "expected files that fit together"),
    ],
)
def test_what_is_found_while_it_loads_ends_the_server(copy, damage, words):
    damage(copy)
    done = subprocess.run(
        [sys.executable, "-m", "compiled_attn", "serve", "--bundle", str(copy), "--port", "0"],
        env=os.environ | {"PYTHONPATH": str(Path(folder.__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    listening, *others, line = done.stderr.splitlines()
    assert done.returncode == 2 and " at http://" in listening, done.stderr
    assert line.startswith(f"compiled-attn: error: bundle {copy}: ") and words in line
    assert not any("Traceback" in each or "ready" in each for each in others)
