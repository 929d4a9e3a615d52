"""A model on several ranks gives the tokens of one process; a lost rank stops all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.compiled_attn.tiny import tiny_model

_WORKER = Path(__file__).with_name("worker.py")
_ROOT = _WORKER.parents[3]

pytestmark = pytest.mark.timeout(900)  # of a machine that others share


def launch(case: str, *arguments: str, ranks: int = 2) -> list[list]:
    """What rank 0 of so many output of a case, or of several with "+" between them."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", str(_WORKER), case, *arguments]
    path = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])
    settings = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    run = subprocess.run(
        command, env=settings, capture_output=True, text=True, timeout=800, check=False
    )
    output = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("[")]
    assert output, run.stderr[-3000:]
    return output


def check_families(output: list[list], *names: str) -> None:
    assert [name for name, *_ in output] == [*names]
    assert all(rest[:4] == [True, 1, "native", 2] for _, *rest in output)  # one KV head of two


def check_layers(distances: list[float]) -> None:
    assert len(distances) == 12 and max(distances) < 3e-6  # of float32, sums of up to 24 keys


def test_two_ranks_give_the_tokens_of_one_process_and_layers_are_dense_attention():
    *families, distances = launch("families", "eager", "llama", "mixtral", "+", "layers")
    check_families(families, "llama", "mixtral")
    check_layers(distances)


@pytest.mark.dist
def test_two_ranks_give_the_tokens_of_one_process_for_more_families():
    names = "qwen3", "gemma2", "qwen3_5_text"  # the last has recurrent states on both ranks
    check_families(launch("families", "eager", *names), *names)


@pytest.mark.dist
def test_captured_graphs_contain_the_sums_and_nothing_compiles_later():
    output = launch("families", "inductor", "llama", "gemma2")
    assert [rest[:2] for _, *rest in output] == [[True, 1]] * 2
    assert all(graphs == 2 for *_, graphs in output)  # symbolic sizes, and one of a single token


@pytest.mark.dist
def test_a_key_head_is_on_several_ranks_where_there_are_fewer_heads():
    output = launch("families", "eager", "llama", "gemma2", ranks=4)
    assert [rest[:2] for _, *rest in output] == [[True, 1]] * 2


@pytest.mark.dist
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("divided", ["weights", "context"])
def test_ranks_agree_whatever_comes_and_goes(seed, divided):
    ((same, whole, preempted, shared, finished, moved),) = launch("chance", str(seed), divided)
    assert same and whole
    assert preempted and shared and finished > 5
    assert bool(moved) == (divided == "weights")


def check_drafts(divided: str, speculate: str, *backend: str) -> None:
    ((same, counts, used, preempted),) = launch("drafts", divided, speculate, *backend)
    assert same and not used and preempted
    assert counts[0] == counts[1]
    drafted, accepted = (sum(counts[0][kind]) for kind in ("drafted", "accepted"))
    assert 10 < accepted < drafted


@pytest.mark.dist
@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("divided", ["weights", "context"])
def test_ranks_check_the_drafts_of_rank_0(divided, backend):
    check_drafts(divided, "ngram:3", backend)


@pytest.mark.dist
@pytest.mark.parametrize("divided", ["weights", "context"])
def test_ranks_check_the_drafts_of_a_model_that_rank_0_has(divided, tmp_path):
    model = tiny_model()
    torch.manual_seed(0)
    for weight in model.parameters():
        weight += 0.02 * weight.std() * torch.randn_like(weight)
    model.save_pretrained(tmp_path)
    check_drafts(divided, f"model:{tmp_path}:3")


@pytest.mark.dist
def test_a_layer_over_keys_of_four_ranks_is_dense_attention():
    (distances,) = launch("layers", ranks=4)
    check_layers(distances)


@pytest.mark.dist
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_divide_contexts_give_the_tokens_of_one_process(ranks):
    names = ["llama", "qwen3", "mixtral", "deepseek_v3"]  # the last keeps latents
    output = launch("contexts", "eager", *names, ranks=ranks)
    assert [name for name, *_ in output] == names
    assert all([rest[0], rest[2]] == [True, "native"] for _, *rest in output)


@pytest.mark.dist
def test_graphs_of_divided_contexts_contain_the_exchange_and_nothing_compiles_later():
    ((_, *rest),) = launch("contexts", "inductor", "llama")
    assert [rest[0], rest[2], rest[-1]] == [True, "native", 2]


@pytest.mark.dist
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_prompt_that_does_not_fit_the_cache_of_one_rank_is_served(ranks):
    ((same, apart, refusal),) = launch("long", ranks=ranks)
    assert same and apart < 1e-4  # of log-probabilities in float32
    assert "expected a pool that holds one request of 41 tokens" in refusal


@pytest.mark.dist
def test_windows_are_refused_where_contexts_are_divided():
    ((line,),) = launch("windows")
    assert "with windows of [9] tokens: use tensor parallelism" in line


@pytest.mark.dist
@pytest.mark.parametrize("divided", ["weights", "context"])
def test_one_rank_compiles_and_a_second_start_loads_on_all(tmp_path, divided):
    ((ranks, stored),) = launch("stored", str(tmp_path), divided)
    (first, *others), graphs = ranks, ranks[0][0]
    assert graphs and first[1:3] == [0, 0]
    assert all(each[:3] == [graphs, graphs, 0] for each in others)  # each a look into the cache
    assert stored == graphs  # by one key on all ranks
    ((ranks, stored),) = launch("stored", str(tmp_path), divided)
    assert all(each[0] == 0 and each[2] == each[3] for each in ranks) and stored == graphs


@pytest.mark.dist
@pytest.mark.parametrize("when", ["warmup", "step", "idle"])
def test_the_end_of_a_rank_is_one_line_on_the_others(when):
    ((line,),) = launch("dies", when)
    assert "got no answer of rank 1 (process" in line and "start all ranks again" in line


@pytest.mark.dist
@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("weights", "weights"),
        ("setting", "setting block_size"),
        ("buckets", "buckets"),
        ("version", "version of torch"),
        ("executor", "executor"),
        ("cut", "weights"),  # of which contexts are to be divided too
    ],
)
def test_a_rank_that_is_another_is_refused_with_the_difference(what, name):
    ((line,),) = launch("differs", what)
    assert f"expected the same {name} on all ranks" in line and "on rank 1" in line


@pytest.mark.dist
def test_a_rank_that_computes_another_step_is_found():
    ((line,),) = launch("disagrees")
    assert "got another one on rank 1: token ids 5 instead of 1 (number 0 of" in line
