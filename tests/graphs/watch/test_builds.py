import os
import subprocess
from pathlib import Path

import pytest

from graphs import CompileWatch, GraphBudgetExceeded, no_compile
from graphs.watch.builds import build_of


@pytest.mark.parametrize(
    ("command", "built"),
    [
        (["g++", "/tmp/x/kernel.cpp", "-O3"], "kernel.cpp"),
        (["/usr/bin/x86_64-linux-gnu-g++-12", "-shared", "main.cpp"], "main.cpp"),
        (["/usr/local/cuda/bin/nvcc", "-arch=sm_90", "attend.cu"], "attend.cu"),
        (["nvcc", "-o", "attend.so", "attend.cu"], "attend.cu"),
        (["hipcc", "-c", "attend.hip"], "attend.hip"),
        (["ptxas", "-v", "--gpu-name=sm_90a", "/tmp/k.ptx", "-o", "/tmp/k.cubin"], "k.ptx"),
        (["cicc", "--arch", "compute_90", "k.cpp1.ii", "-o", "k.ptx"], "k.ptx"),
        (["clang++-18", "a.cc"], "a.cc"),
        (["/opt/rocm/llvm/bin/amdclang++", "a.cc"], "a.cc"),
        (["ccache", "g++", "-c", "a.cc"], "a.cc"),
        (["env", "CXX=g++", "nvcc", "a.cu"], "a.cu"),
        ([b"g++", Path("/tmp/a.cc")], "a.cc"),
        (["/bin/sh", "-c", "cd /tmp && CC=gcc nvcc 'my kernel.cu' -o k"], "my kernel.cu"),
        (["bash", "-lc", "true; ninja -v"], "a C++ extension (ninja)"),
        (["ninja", "-v"], "a C++ extension (ninja)"),
        (["sh", "-c", "echo g++ a.cc"], ""),
        (["sh", "-c", "g++ 'a.cc"], ""),
        (["sh", "build.sh"], ""),
        (["g++", "--version"], ""),
        (["g++", "-v"], ""),
        (["c++", "-dumpfullversion", "-dumpversion"], ""),
        (["ninja", "--version"], ""),
        (["gcc-report", "x.c"], ""),
        (["python", "g++.py"], ""),
        (["ccache"], ""),
        ([], ""),
    ],
)
def test_a_build_is_a_compiler_with_a_source_and_no_question_for_its_version(command, built):
    assert build_of(command) == built


@pytest.fixture
def compiler(tmp_path):
    path = tmp_path / "nvcc"
    path.write_text(f"#!/bin/sh\ntouch {tmp_path / 'ran'}\n")
    path.chmod(0o755)
    return str(path)


def posix_spawn(compiler):
    os.waitpid(os.posix_spawn(compiler, [compiler, "a.cu"], os.environ), 0)


WAYS = {
    "subprocess": lambda compiler: subprocess.run([compiler, "a.cu"]),
    "subprocess without closing files": lambda compiler: subprocess.run(
        [compiler, "a.cu"], close_fds=False
    ),
    "shell": lambda compiler: subprocess.run(f"{compiler} a.cu", shell=True),
    "os.system": lambda compiler: os.system(f"{compiler} a.cu"),
    "os.popen": lambda compiler: os.popen(f"{compiler} a.cu").close(),
    "os.posix_spawn": posix_spawn,
    "os.spawnv": lambda compiler: os.spawnv(os.P_WAIT, compiler, [compiler, "a.cu"]),
    "os.spawnlp": lambda compiler: os.spawnlp(os.P_WAIT, compiler, compiler, "a.cu"),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_compiler_is_seen_however_it_is_started(way, compiler, tmp_path):
    with CompileWatch() as watch:
        way(compiler)
    assert [(event.kind, event.function) for event in watch.events] == [("build", "a.cu")]
    (tmp_path / "ran").unlink()
    with no_compile(), pytest.raises(GraphBudgetExceeded, match=r"build of a\.cu"):
        way(compiler)
    assert not (tmp_path / "ran").exists()
