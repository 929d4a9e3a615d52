"""Building and caching the kernels, mostly with a fake compiler."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from compiled_attn.ops import NativeUnavailable
from compiled_attn.ops.cpu.build import Build, _run_all, build
from compiled_attn.ops.cpu.libraries import build_lock
from compiled_attn.ops.schema import SOURCES
from graphs.errors import StoreBusy
from graphs.store.lock import Lock

CALLS = 7  # six units and a link
COMPILER = """#!/bin/sh
# Notes each call, sleeps as long as the file "seconds" says, writes what is behind -o.
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


def test_whatever_the_library_depends_on_gives_it_another_name(make, compiler, tmp_path):
    sources = tmp_path / "sources"
    shutil.copytree(SOURCES, sources)

    def name(*args, **options) -> str:
        return make(*args, sources=sources, **options).library.name

    names = [name(), name("avx2"), name(namespace="other"), name(debug=True)]
    names.append(name(sanitize=("address",)))
    for header in ("schema.h", "attention/plan.h"):
        with (sources / header).open("a") as file:
            file.write("// changed\n")
        names.append(name())
    (compiler.parent / "version").write_text("pretender 1.1")
    names.append(name())
    assert len(set(names)) == len(names)


def test_another_torch_gives_the_library_another_name(make, monkeypatch):
    first = make()
    monkeypatch.setattr("torch.__version__", "2.99")
    assert make().library != first.library


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


def test_a_library_that_is_not_whole_is_built_again(make):
    made = make()
    made.library.write_text("lib")
    again = make()
    assert again.library.read_text() == "library\n" and again.seconds > 0


@pytest.mark.parametrize(
    ("what", "other"), [("machine", "riscv64"), ("libc_ver", ("glibc", "9.99"))]
)
def test_another_system_gives_the_library_another_name(make, monkeypatch, what, other):
    first = make()
    monkeypatch.setattr(f"platform.{what}", lambda: other)
    assert make().library != first.library


def _age(library: Path, days: float) -> None:
    then = time.time() - days * 24 * 3600
    os.utime(library.with_suffix(".sha256"), (then, then))


def test_libraries_that_nobody_took_for_a_month_are_removed_by_the_next_build(make, folder):
    unused, locked, recent = (
        make(namespace=name).library for name in ("unused", "locked", "recent")
    )
    foreign = folder / "backup.so"
    for path in (foreign, foreign.with_suffix(".sha256")):
        path.touch()
    for library, days in ((unused, 31), (locked, 31), (foreign, 99), (recent, 29)):
        _age(library, days)
    lock = Lock(locked.with_suffix(".lock"))
    assert lock.take()
    new = make(namespace="new").library
    lock.close()
    assert not list(folder.glob(f"{unused.stem}*"))
    assert all(path.exists() for path in (locked, recent, foreign, new))


def test_a_library_that_is_taken_is_not_unused(make):
    made = make().library
    _age(made, 31)
    assert make().seconds == 0.0
    make(namespace="other")
    assert made.exists()


def test_who_waited_for_a_lock_that_was_removed_takes_the_new_one(tmp_path):
    library, entered = tmp_path / "library.so", threading.Event()

    def enter() -> None:
        with build_lock(library, 60.0):
            other = Lock(library.with_suffix(".lock"))
            if not other.take():
                entered.set()
            other.close()

    removed = Lock(library.with_suffix(".lock"))
    assert removed.take()
    thread = threading.Thread(target=enter)
    thread.start()
    removed.path.unlink()
    assert entered.wait(30.0)  # though the removed lock is still held
    thread.join()
    removed.close()


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


@pytest.mark.parametrize("seal", [b"", b"\xff\xfe\x00", b"0" * 64])
def test_a_library_with_a_broken_seal_is_built_again(make, seal):
    made = make()
    made.library.with_suffix(".sha256").write_bytes(seal)
    again = make()
    assert again.library == made.library and again.seconds > 0
    assert make().seconds == 0.0


def test_without_a_home_the_kernel_is_unavailable(make, compiler, monkeypatch):
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with pytest.raises(NativeUnavailable, match=r"got none: Could not determine home directory"):
        make(folder=None)
    assert _calls(compiler) == 0


def test_an_error_of_the_compiler_is_told_and_nothing_is_kept(make, folder, compiler):
    (compiler.parent / "broken").touch()
    with pytest.raises(NativeUnavailable, match=r"failed \(7\): error: no such thing"):
        make()
    assert not list(folder.glob("*.so")) and not list(folder.glob(".portable*"))


def test_a_compiler_that_does_not_exist_is_told(make):
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


def test_a_library_behind_a_link_to_the_folder_is_named_by_where_it_is(make, folder, tmp_path):
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


def test_what_a_killed_build_of_another_version_left_is_removed_unless_it_goes_on(make, folder):
    folder.mkdir(mode=0o700)
    dead, alive = (f"portable-{letter * 32}" for letter in "ab")
    for name in (dead, alive):
        (folder / f".{name}.work").mkdir()
        (folder / f".{name}.work" / "library.so").touch()
    (folder / ".something.else").touch()
    lock = Lock(folder / f"{alive}.lock")
    assert lock.take()
    make()
    lock.close()
    assert not list(folder.glob(f"*{dead}*"))
    assert (folder / f".{alive}.work").exists() and (folder / ".something.else").exists()


def test_a_folder_that_cannot_be_made_is_refused(make, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NativeUnavailable, match="expected a folder of your own"):
        make(folder=tmp_path / "file" / "cache")
