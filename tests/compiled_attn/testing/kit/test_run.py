"""Runs of the kit: reports, what an op may do wrong without ending the run, shrinking."""

from __future__ import annotations

import json

import pytest
import torch

from compiled_attn import flash_attn_with_kvcache
from compiled_attn.testing import Capabilities
from compiled_attn.testing.kit import CASES, Subject, check
from compiled_attn.testing.kit.checks import replay
from compiled_attn.testing.kit.run import run_case, steps_of
from compiled_attn.testing.kit.trial import Mismatch
from graphs.backends.cudagraph import CudaGraphBackend
from tests.compiled_attn.testing.kit.kernels import CLAIMS, Kernel, WritingKernel
from tests.graphs.backends.dispatch_double import DispatchDouble

FEW = ["decode", "window", "replay"]


def test_what_is_not_claimed_is_skipped_by_name():
    report = check(Kernel(), CLAIMS.replace(features=frozenset({"window"})), cases=FEW)
    status = {each.case.name: each.status for each in report.results}
    assert status == {"decode": "passed", "window": "passed", "replay": "not claimed"}
    assert "not claimed" in str(report) and report.ok and report.script is None


def test_a_report_is_the_same_in_text_json_and_html():
    report = check(Kernel("window off by one"), cases=FEW)
    plain = json.loads(json.dumps(report.to_dict()))
    assert not plain["ok"] and plain["interface"] == "op"
    (failed,) = (each for each in plain["cases"] if each["status"] == "failed")
    assert failed["name"] == "window" and failed["message"].startswith("out[")
    (row,) = (each for each in plain["features"] if each["feature"] == "window")
    assert row["status"] == "failed" and row["cases"] == 1
    decode = next(each for each in plain["cases"] if each["name"] == "decode")
    assert 0 < decode["error"] <= decode["allowed"] < 1e-4
    assert plain["versions"]["torch"] == torch.__version__
    for text in (str(report), report.to_html()):
        assert "window" in text and "FAILED" in text and failed["message"][:20] in text


def test_nan_that_passes_is_the_failure_of_the_cases_about_it_alone():
    report = check(
        Kernel("multiplies hidden values by 0"), cases=["poison", "window", "padding", "empty"]
    )
    status = {each.case.name: each.status for each in report.results}
    assert status.pop("poison_nan") == status.pop("poison_inf") == "failed"
    assert status["window"] == status["empty_rows"] == "passed" and "failed" not in status.values()


def test_the_same_seed_gives_the_same_steps_and_another_one_others():
    subject = Subject.of(Kernel())
    case = CASES[0]
    steps = [[*steps_of(subject, case, seed)] for seed in (0, 0, 1)]
    assert steps[0] == steps[1] != steps[2]


def test_every_size_that_is_claimed_occurs_in_every_case():
    claims = CLAIMS.replace(
        dtypes=(torch.float32, torch.bfloat16), head_dims=(16, 24, 32), block_sizes=(4, 8)
    )
    subject = Subject.of(Kernel(), claims)
    for case in CASES:
        steps = [*steps_of(subject, case)]
        if steps and case.sizes != "first":
            assert {step.dtype for step in steps} == {*claims.dtypes}
            assert {step.head_dim for step in steps} == {*claims.head_dims}
            assert {step.block_size for step in steps} == {*claims.block_sizes}


def test_the_largest_group_is_tested_in_the_first_dtype():
    claims = CLAIMS.replace(dtypes=(torch.float32, torch.bfloat16), groups=(1, 4))
    case = next(each for each in CASES if each.name == "window")
    steps = [*steps_of(Subject.of(Kernel(), claims), case)]
    groups = {step.dtype: step.heads // step.kv_heads for step in steps}
    assert groups == {torch.float32: 4, torch.bfloat16: 1}


def test_a_block_of_many_counts_in_bfloat16():
    def op(query, key_cache, value_cache, block_table, seq_lens, query_start_loc, scale):
        value_cache = value_cache.clone()
        value_cache[block_table[seq_lens > 1000, 3].long()] = 0
        step = block_table, seq_lens, query_start_loc, scale
        return Kernel()(query, key_cache, value_cache, *step)

    claims = Capabilities(dtypes=(torch.bfloat16,), head_dims=(64,), groups=(1,))
    assert not check(op, claims, cases=["long_context"]).ok


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda out, lse: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda out, lse: None, "expected an output of torch.float32"),
        (lambda out, lse: (out[:-1], lse), "expected an output of torch.float32"),
        (lambda out, lse: (out.double(), lse), "got torch.float64"),
        (lambda out, lse: (out * torch.nan, lse), "got nan"),
        (lambda out, lse: (out, lse, lse), "returned a tuple of 3"),
    ],
)
def test_an_op_that_raises_or_returns_something_else_fails_its_case(wrong, message):
    kernel = Kernel()

    def op(query, key_cache, value_cache, block_table, seq_lens, query_start_loc, scale):
        step = block_table, seq_lens, query_start_loc, scale
        return wrong(*kernel(query, key_cache, value_cache, *step))

    claims = Capabilities(head_dims=(16,), block_sizes=(4,), groups=(1,))
    report = check(op, claims, cases=["decode", "scale"])
    assert [each.status for each in report.results] == ["failed", "failed"]
    assert message in report.results[0].message


def test_an_op_that_ends_the_process_fails_its_case():
    def op(query, key_cache, value_cache, block_table, seq_lens, query_start_loc, scale):
        raise SystemExit(0)

    claims = Capabilities({"replay"}, head_dims=(16,), block_sizes=(4,), groups=(1,))
    report = check(op, claims, cases=["decode", "same_buffers", "replay"])
    assert [each.status for each in report.results] == ["failed"] * 3
    assert "SystemExit" in report.results[0].message


def test_blocks_of_one_token_pass():
    report = check(Kernel(), CLAIMS.replace(block_sizes=(1,)), cases=["mixed", "neighbours"])
    assert report.ok, report


def test_what_an_op_writes_is_tested_whether_it_claims_it_or_not():
    claims = Capabilities(head_dims=(16,), block_sizes=(4,), groups=(2,))
    report = check(WritingKernel("clears the rest of the block"), claims, cases=["append"])
    assert not report.ok


def test_an_empty_row_may_have_the_log_sum_exp_of_flash_attention():
    def op(q, k_cache, v_cache, cache_seqlens, block_table, softmax_scale, causal,
           return_softmax_lse=False):  # fmt: skip
        out, lse = flash_attn_with_kvcache(
            q, k_cache, v_cache, cache_seqlens=cache_seqlens, block_table=block_table,
            softmax_scale=softmax_scale, causal=causal, return_softmax_lse=True,
        )  # fmt: skip
        return out, lse.masked_fill(lse.isneginf(), torch.inf)

    claims = Capabilities({"empty_rows", "lse"}, head_dims=(32,), block_sizes=(4,), groups=(1,))
    report = check(op, claims, cases=["empty_rows", "lse"])
    assert report.ok, report


def test_outputs_may_be_views():
    def op(query, key_cache, value_cache, block_table, seq_lens, query_start_loc, scale):
        step = block_table, seq_lens, query_start_loc, scale
        out, _ = Kernel()(query, key_cache, value_cache, *step)
        return out.transpose(0, 1).contiguous().transpose(0, 1)

    assert check(op, Capabilities(head_dims=(16,), block_sizes=(4,)), cases=["decode"]).ok


def test_the_first_failure_is_shrunk_to_sizes_that_are_claimed():
    claims = CLAIMS.replace(head_dims=(32, 16), block_sizes=(8, 4), groups=(4, 2))
    subject = Subject.of(Kernel("window off by one"), claims)
    case = next(each for each in CASES if each.name == "window")
    step = run_case(subject, case).step
    assert len(step.requests) == 1 and step.window is not None
    assert step.requests[0][1] <= 2 and step.head_dim == 16 and step.block_size == 4
    assert (step.heads, step.kv_heads) == (2, 1) and step.seed == 0


def test_a_step_that_can_be_captured_is_replayed():
    def op(query, key_cache, value_cache, block_table, seq_lens, query_start_loc, scale):
        slots = (block_table.unsqueeze(-1) * 4 + torch.arange(4)).flatten(1)
        keys, values = (x.flatten(0, 1)[slots] for x in (key_cache, value_cache))
        scores = torch.einsum("nhd,nlhd->nhl", query * scale, keys)
        hidden = torch.arange(slots.shape[1]) >= seq_lens[:, None]
        weights = scores.masked_fill(hidden[:, None], float("-inf")).softmax(-1)
        return torch.einsum("nhl,nlhd->nhd", weights, values)

    claims = Capabilities({"replay"}, head_dims=(16,), block_sizes=(4,), groups=(1,))
    report = check(op, claims, cases=["replay"])
    assert report.ok and report.results[0].message == "", report


@pytest.mark.parametrize("bug", ["", "stale lengths"])
def test_a_recorded_graph_replays_what_it_recorded(bug):
    """On a double of CUDA graphs, which like them replays operators with the numbers of then."""

    def op(query, key_cache, value_cache, block_table, seq_lens, query_start_loc, scale):
        slots = (block_table.unsqueeze(-1) * 4 + torch.arange(4)).flatten(1)
        keys, values = (x.flatten(0, 1)[slots] for x in (key_cache, value_cache))
        scores = torch.einsum("nhd,nlhd->nhl", query * scale, keys)
        lengths = torch.tensor(seq_lens.tolist()) if bug else seq_lens
        hidden = torch.arange(slots.shape[1]) >= lengths[:, None]
        weights = scores.masked_fill(hidden[:, None], float("-inf")).softmax(-1)
        return torch.einsum("nhl,nlhd->nhd", weights, values)

    claims = Capabilities({"replay"}, head_dims=(16,), block_sizes=(4,), groups=(1,))
    subject = Subject.of(op, claims)
    step = next(steps_of(subject, next(each for each in CASES if each.name == "replay")))
    backend = CudaGraphBackend(DispatchDouble)
    if not bug:
        assert replay(subject.trial, step, backend).note == ""
        return
    with pytest.raises(Mismatch, match="replayed with other metadata in the same buffers: out"):
        replay(subject.trial, step, backend)
