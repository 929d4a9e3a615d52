import subprocess
import sys

import pytest

from graphs.watch.hooks import Listener, _build_of, listen, unlisten


@pytest.mark.parametrize(
    ("command", "built"),
    [
        (["g++", "/tmp/x/kernel.cpp", "-O3"], "kernel.cpp"),
        (["/usr/bin/x86_64-linux-gnu-g++-12", "-shared", "main.cpp"], "main.cpp"),
        (["/usr/local/cuda/bin/nvcc", "-arch=sm_90", "attend.cu"], "attend.cu"),
        (["clang++-18", "a.cc"], "a.cc"),
        (["ninja", "-v"], "a C++ extension (ninja)"),
        (["g++", "--version"], ""),
        (["g++", "-v"], ""),
        (["c++", "-dumpfullversion", "-dumpversion"], ""),
        (["ninja", "--version"], ""),
        (["gcc-report", "x.c"], ""),
        (["python", "g++.py"], ""),
        ([], ""),
    ],
)
def test_a_build_is_a_compiler_with_a_source_and_no_question_for_its_version(command, built):
    assert _build_of(command) == built


def test_a_listener_hears_of_builds_until_it_stops_listening():
    heard = []
    listener = Listener(built=heard.append)
    listen(listener)
    try:
        subprocess.run(["cc", "--version"], capture_output=True)
        subprocess.run([sys.executable, "-c", ""])
        subprocess.run(["cc", "nothing.c"], capture_output=True)
    finally:
        unlisten(listener)
    subprocess.run(["cc", "nothing.c"], capture_output=True)
    assert heard == ["nothing.c"]


def test_what_a_listener_raises_stops_the_build():
    def refuse(built):
        raise RuntimeError(f"no {built}")

    listener = Listener(built=refuse)
    listen(listener)
    try:
        with pytest.raises(RuntimeError, match=r"no nothing\.c"):
            subprocess.Popen(["cc", "nothing.c"])
    finally:
        unlisten(listener)
