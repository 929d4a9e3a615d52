import pytest

from graphs.watch.builds import build_of


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
    assert build_of(command) == built
