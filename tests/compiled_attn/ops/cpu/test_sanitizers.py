"""The kernels under address and undefined-behaviour sanitizers, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from compiled_attn.ops import available_isas
from compiled_attn.ops.cpu.build import find_compiler

pytestmark = pytest.mark.slow


def _runtime(compiler: str, name: str) -> str:
    """Path of a sanitizer's runtime library."""
    done = subprocess.run(
        [compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.mark.timeout(1800)  # with sanitizers a kernel takes minutes to compile
@pytest.mark.parametrize(
    ("isa", "tiles"), [(isa, "none") for isa in available_isas()] + [("portable", "plain")]
)
@pytest.mark.usefixtures("compiler")
def test_every_case_is_clean_under_the_sanitizers(isa, tiles):
    asan = _runtime(find_compiler(), "libasan.so")
    if not Path(asan).is_absolute():
        pytest.skip("the compiler has no shared libasan to preload")
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[4]),
        # With libstdc++ from the start, or asan does not find what throws exceptions.
        "LD_PRELOAD": f"{asan} {_runtime(find_compiler(), 'libstdc++.so')}",
        # Python does not free all its memory; torch's own threads are no concern of this test.
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0",
        "OMP_NUM_THREADS": "2",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.compiled_attn.ops.native_driver", isa, tiles],
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[4],
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert done.stdout.startswith("clean")
