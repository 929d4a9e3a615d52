"""Building and caching the kernels, mostly with a fake compiler."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from compiled_attn.ops import NativeUnavailable
from compiled_attn.ops.cpu.build import (
    PARTS,
    UNITS,
    Build,
    _run_all,
    build,
    build_part,
    path_of_part,
)
from compiled_attn.ops.cpu.libraries import build_lock
from compiled_attn.ops.schema import SOURCES
from graphs.errors import StoreBusy

CALLS = len(UNITS) + 1  # and the linker
COMPILER = """#!/bin/sh
# Logs each call, sleeps for the seconds in the file "seconds", writes the file after -o.
here=$(dirname "$0")
if [ "$1" = --version ]; then cat "$here/version"; exit 0; fi
echo "$@" >> "$here/calls"
if [ -f "$here/broken" ]; then echo "error: no such thing"; exit 7; fi
sleep "$(cat "$here/seconds")"
while [ $# -gt 1 ]; do [ "$1" = -o ] && out=$2; shift; done
echo library > "$out"
"""
BUILD = """
import sys
from pathlib import Path
from compiled_attn.ops import build
made = build("portable", "test", folder=Path(sys.argv[1]), compiler=sys.argv[2])
print(made.library, made.seconds > 0)
"""


@pytest.fixture
def compiler(tmp_path) -> Path:
    path = tmp_path / "compiler" / "c++"
    path.parent.mkdir()
    path.write_text(COMPILER)
    path.chmod(0o755)
    (path.parent / "version").write_text("pretender 1.0")
    (path.parent / "seconds").write_text("0")
    return path


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def make(folder, compiler) -> Callable[..., Build]:
    """Builds a library with the fake compiler."""

    def made(isa="portable", namespace="test", **options) -> Build:
        return build(isa, namespace, **{"folder": folder, "compiler": str(compiler), **options})

    return made


def _calls(compiler: Path) -> int:
    calls = compiler.parent / "calls"
    return len(calls.read_text().splitlines()) if calls.exists() else 0


def _process(folder: Path, compiler: Path) -> subprocess.Popen[str]:
    root = str(Path(__file__).parents[4])
    return subprocess.Popen(
        [sys.executable, "-c", BUILD, str(folder), str(compiler)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": root},
        start_new_session=True,
    )


def test_a_second_build_of_the_same_is_taken_from_the_cache(make, compiler):
    first = make()
    assert _calls(compiler) == CALLS
    second = make()
    assert second.library == first.library and second.seconds == 0.0
    assert _calls(compiler) == CALLS


def test_whatever_the_library_depends_on_gives_it_another_name(
    make, compiler, tmp_path, monkeypatch
):
    sources = tmp_path / "sources"
    shutil.copytree(SOURCES, sources)

    def name(*args, **options) -> str:
        return make(*args, sources=sources, **options).library.name

    names = [name(), name("avx2"), name(namespace="other")]
    names += [name(sanitize=("address",)), name(plain_tiles=True)]
    for header in ("schema.h", "attention/plan.h"):
        with (sources / header).open("a") as file:
            file.write("// changed\n")
        names.append(name())
    (compiler.parent / "version").write_text("pretender 1.1")
    names.append(name())
    monkeypatch.setattr("torch.__version__", "2.99")
    names.append(name())
    for what, other in (("machine", "riscv64"), ("libc_ver", ("glibc", "9.99"))):
        monkeypatch.setattr(f"platform.{what}", lambda other=other: other)
        names.append(name())
    assert len(set(names)) == len(names)


def test_parts_can_be_libraries_of_their_own(make, folder, compiler):
    whole, divided = make(), make(divided=True)
    assert (whole.is_divided, divided.is_divided) == (False, True)
    calls = 2 * CALLS - len(PARTS)
    assert whole.library != divided.library and _calls(compiler) == calls
    for bits in PARTS:
        for _ in range(2):
            part = build_part(bits, "portable", "test", folder=folder, compiler=str(compiler))
            assert part == path_of_part(divided.library, bits) and part.exists()
        calls += 2
        assert _calls(compiler) == calls
    (compiler.parent / "broken").touch()
    part.write_text("damaged")
    with pytest.raises(NativeUnavailable, match="no such thing"):
        build_part(bits, "portable", "test", folder=folder, compiler=str(compiler))


def test_processes_that_want_the_same_build_it_once(folder, compiler):
    (compiler.parent / "seconds").write_text("0.3")
    processes = [_process(folder, compiler) for _ in range(2)]
    outputs = [process.communicate()[0].split() for process in processes]
    assert len({path for path, _ in outputs}) == 1
    assert sorted(built for _, built in outputs).count("True") == 1
    assert _calls(compiler) == CALLS


def test_a_build_says_so_on_stderr_before_the_compiler_runs(make, compiler, capsys):
    (compiler.parent / "broken").touch()
    with pytest.raises(NativeUnavailable):
        make()
    said = capsys.readouterr().err
    assert said.startswith(
        f"compiled-attn: building the native kernel for portable with {compiler}"
    )
    (compiler.parent / "broken").unlink()
    make()
    assert capsys.readouterr().err.count("\n") == 1
    make()
    assert capsys.readouterr().err == ""  # it was there


def test_one_that_waits_for_another_process_says_so_once(make, folder, compiler, capsys):
    (compiler.parent / "seconds").write_text("1")
    process = _process(folder, compiler)
    while _calls(compiler) < 2:
        assert process.poll() is None
        time.sleep(0.02)
    make()
    process.communicate()
    assert capsys.readouterr().err == (
        "compiled-attn: another process builds the native kernel for portable: waiting for it\n"
    )


def test_a_killed_build_leaves_nothing_that_counts(make, folder, compiler):
    (compiler.parent / "seconds").write_text("60")
    process = _process(folder, compiler)
    while _calls(compiler) < 2:
        assert process.poll() is None
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert not list(folder.glob("*.so")) and list(folder.glob(".portable*"))
    (compiler.parent / "seconds").write_text("0")
    made = make()
    assert made.library.read_text() == "library\n" and not list(folder.glob(".portable*"))


def test_a_turn_that_does_not_come_is_an_error(tmp_path):
    library = tmp_path / "library.so"
    with (
        build_lock(library, 1.0),
        pytest.raises(StoreBusy, match="locked for 0 s"),
        build_lock(library, 0.0),
    ):
        pass


def test_only_the_owner_can_change_a_library_and_leftover_files_go(make, folder):
    made = make().library
    assert made.stat().st_mode & 0o777 == 0o700
    made.unlink()
    leftover = folder / f".{made.stem}.sha256.1.new"
    leftover.touch()
    assert make().library == made
    assert not leftover.exists()


@pytest.mark.parametrize(
    ("suffix", "content"),
    [(".sha256", b""), (".sha256", b"\xff\xfe\x00"), (".sha256", b"0" * 64), (".so", b"lib")],
)
def test_a_damaged_library_or_seal_is_built_again(make, suffix, content):
    made = make()
    made.library.with_suffix(suffix).write_bytes(content)
    again = make()
    assert again.library == made.library and again.seconds > 0
    assert again.library.read_text() == "library\n"
    assert make().seconds == 0.0


def test_without_a_home_the_kernel_is_unavailable(make, compiler, monkeypatch):
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with pytest.raises(NativeUnavailable, match=r"got none: Could not determine home directory"):
        make(folder=None)
    assert _calls(compiler) == 0


def test_an_error_of_the_compiler_is_reported_and_nothing_is_cached(make, folder, compiler):
    (compiler.parent / "broken").touch()
    with pytest.raises(NativeUnavailable, match=r"failed \(7\): error: no such thing"):
        make()
    assert not list(folder.glob("*.so")) and not list(folder.glob(".portable*"))


def test_a_compiler_that_does_not_exist_is_reported(make):
    with pytest.raises(NativeUnavailable, match=r"/no/such/compiler --version fails"):
        make(compiler="/no/such/compiler")


def test_a_command_that_cannot_start_stops_those_that_did(monkeypatch):
    started, popen = [], subprocess.Popen

    def start(*args, **kwargs):
        started.append(popen(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(NativeUnavailable, match="expected to run /no/such/compiler"):
        _run_all([["sleep", "600"], ["/no/such/compiler"]])
    assert [process.returncode for process in started] == [-signal.SIGKILL]


def test_a_folder_that_others_can_write_to_is_refused(make, folder, compiler):
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(NativeUnavailable, match="writable by others"):
        make()
    assert _calls(compiler) == 0


@pytest.mark.parametrize("suffix", [".so", ".sha256"])
def test_a_library_or_seal_that_is_a_link_is_refused(make, tmp_path, suffix):
    """Also one to the very library that was built: what it leads to can be exchanged later."""
    made = make().library
    path = made.with_suffix(suffix)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NativeUnavailable, match=rf"{path.name} is a link.*remove it"):
        make()
    path.unlink()
    assert make().library == made
    assert not made.is_symlink()


def test_a_library_in_a_linked_folder_has_its_real_path(make, folder, tmp_path):
    """The link is followed once; the folder that is used is the one that was checked."""
    (tmp_path / "link").symlink_to(folder)
    folder.mkdir(mode=0o700)
    made = make(folder=tmp_path / "link")
    assert made.library.parent == folder.resolve()
    folder.chmod(0o777)
    with pytest.raises(NativeUnavailable, match="writable by others"):
        make(folder=tmp_path / "link")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("suffix", [".so", ".sha256"])
def test_a_library_of_another_user_is_refused(make, suffix):
    made = make().library
    os.chown(made.with_suffix(suffix), 12345, 12345)
    with pytest.raises(NativeUnavailable, match="belongs to user 12345"):
        make()


def test_a_library_that_others_can_write_to_is_refused(make):
    made = make().library
    made.chmod(0o722)
    with pytest.raises(NativeUnavailable, match=r"writable by others \(mode 722\)"):
        make()


def test_a_folder_that_cannot_be_made_is_refused(make, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NativeUnavailable, match="expected a folder of your own"):
        make(folder=tmp_path / "file" / "cache")
