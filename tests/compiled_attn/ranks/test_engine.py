"""A model on several ranks gives the tokens of one process, and a lost rank ends them all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_WORKER = Path(__file__).with_name("worker.py")
_ROOT = _WORKER.parents[3]


def launched(case: str, *arguments: str, ranks: int = 2) -> list[list]:
    """What rank 0 of so many said."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", str(_WORKER), case, *arguments]
    path = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])
    settings = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    run = subprocess.run(
        command, env=settings, capture_output=True, text=True, timeout=400, check=False
    )
    said = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("[")]
    assert said, run.stderr[-3000:]
    return said


def test_two_ranks_give_the_tokens_of_one_process():
    said = launched("families", "eager", "llama", "qwen3", "gemma2", "mixtral")
    names = [name for name, *_ in said]
    assert names == ["llama", "qwen3", "gemma2", "mixtral"]
    assert all(rest[:3] == [True, 1, "native"] for _, *rest in said)  # one KV head of two


@pytest.mark.dist
def test_captured_graphs_contain_the_sums_and_nothing_compiles_later():
    said = launched("families", "inductor", "llama", "gemma2")
    assert [rest[:2] for _, *rest in said] == [[True, 1]] * 2
    assert all(graphs == 2 for *_, graphs in said)  # symbolic sizes, and one of a single token


@pytest.mark.dist
def test_a_key_head_is_on_several_ranks_where_there_are_fewer_heads():
    said = launched("families", "eager", "llama", "gemma2", ranks=4)
    assert [rest[:2] for _, *rest in said] == [[True, 1]] * 2


@pytest.mark.dist
@pytest.mark.parametrize("seed", range(3))
def test_ranks_agree_whatever_comes_and_goes(seed):
    ((same, whole, preempted, shared, finished, moved),) = launched("chance", str(seed))
    assert same and whole
    assert preempted and shared and moved and finished > 5


@pytest.mark.dist
@pytest.mark.parametrize("when", ["warmup", "step", "idle"])
def test_the_end_of_a_rank_is_one_line_on_the_others(when):
    ((line,),) = launched("dies", when)
    assert "got no answer of rank 1 (process" in line and "start all of them again" in line


@pytest.mark.dist
@pytest.mark.parametrize(
    ("what", "name"),
    [("weights", "weights"), ("setting", "setting block_size"), ("buckets", "buckets")],
)
def test_a_rank_that_is_another_is_refused_with_the_difference(what, name):
    ((line,),) = launched("differs", what)
    assert f"expected the same {name} on all ranks" in line and "on rank 1" in line


@pytest.mark.dist
def test_a_rank_that_computes_another_step_is_found():
    ((line,),) = launched("disagrees")
    assert "got another one on rank 1: token ids 5 instead of 1 (number 0 of" in line
