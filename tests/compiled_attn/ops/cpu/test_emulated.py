"""The kernels on processors that this machine is not: compiled across, run under an emulator."""

import shutil
import subprocess
from pathlib import Path

import pytest

from compiled_attn.ops.cpu.build import KERNELS
from compiled_attn.ops.schema import SOURCES

PROGRAM = Path(__file__).with_name("emulated.cpp")
FLAGS = ["-std=c++20", "-O2", "-fopenmp", "-static", "-ffp-contract=fast", "-fno-math-errno"]


@pytest.mark.slow
def test_random_steps_hold_on_an_emulated_aarch64(tmp_path):
    compiler, emulator = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
    if not compiler or not emulator:
        pytest.skip("needs g++-aarch64-linux-gnu and qemu-user")
    program = tmp_path / "emulated"
    attention = [str(SOURCES / each) for each in KERNELS if each.startswith("attention/")]
    units = [str(PROGRAM), *attention]
    subprocess.run([compiler, *FLAGS, f"-I{SOURCES}", *units, "-o", str(program)], check=True)
    ran = subprocess.run([emulator, str(program), "4"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("allowed") == 6
