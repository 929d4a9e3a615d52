"""The command under torchrun: Ctrl-C ends every rank, and a rank of other settings is refused."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.timeout(900)  # of a machine that others share

_RUN = ["-m", "compiled_attn", "run", "--backend", "eager", "--no-store"]


def started(folder: Path, *arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", "--redirects=3", f"--log-dir={folder}", *arguments]
    settings = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT)}
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command, env=settings, start_new_session=True, **silent)


def output(folder: Path, rank: int) -> str:
    return "".join(path.read_text() for path in folder.glob(f"*/attempt_0/{rank}/std*.log"))


@pytest.mark.dist
@pytest.mark.parametrize("to_all", [True, False], ids=["terminal", "torchrun-alone"])
def test_ctrl_c_ends_all_ranks_without_a_traceback(tmp_path, to_all):
    run = started(tmp_path, *_RUN, "--requests", "400")
    while "threads:" not in output(tmp_path, 0):  # then both have begun
        assert run.poll() is None, output(tmp_path, 0)
        time.sleep(0.1)
    time.sleep(3)
    (os.killpg if to_all else os.kill)(run.pid, signal.SIGINT)
    run.wait(timeout=800)
    for rank in (0, 1):
        assert "interrupted" in output(tmp_path, rank)
        assert "Traceback" not in output(tmp_path, rank)


@pytest.mark.dist
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_divided_contexts_give_the_tokens_of_plain_transformers(tmp_path, dtype):
    arguments = ["--context-parallel", "--dtype", dtype, "--requests", "4", "--check", "4"]
    arguments += ["--scale", "0.1", "--max-seqs", "2", "--json", str(tmp_path / "result.json")]
    run = started(tmp_path, *_RUN, *arguments)
    assert run.wait(timeout=800) == 0, output(tmp_path, 0)
    assert "4 requests" in output(tmp_path, 0)
    assert json.loads((tmp_path / "result.json").read_text())["ranks"] == 2
    assert re.search(r"ranks\W+2\b", output(tmp_path, 0))


@pytest.mark.dist
def test_ranks_of_other_settings_say_the_difference(tmp_path):
    shell = f"exec {sys.executable} {' '.join(_RUN)} --max-seqs $((RANK + 4))"
    run = started(tmp_path, "--no-python", "bash", "-c", shell)
    assert run.wait(timeout=800)
    for rank in (0, 1):
        expected = (
            "expected the same setting max_seqs on all ranks, got 5 on rank 1 and 4 on rank 0"
        )
        assert expected in output(tmp_path, rank)
