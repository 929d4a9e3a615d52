"""Broken kernels: each is found, by the case that is about what is wrong with it."""

from __future__ import annotations

import pytest
import torch

from compiled_attn import flash_attn_with_kvcache, paged_attention_v2
from compiled_attn.testing import Capabilities
from compiled_attn.testing.kit import CASES, Subject, check
from compiled_attn.testing.kit.run import run_case
from compiled_attn.testing.kit.settings import changed, settings
from tests.compiled_attn.testing.kit.kernels import (
    BUGS,
    CLAIMS,
    SIZES,
    WRITING_BUGS,
    Kernel,
    WritingKernel,
)


@pytest.mark.parametrize("kernel", [Kernel(), WritingKernel()], ids=lambda k: type(k).__name__)
def test_the_kernel_without_a_bug_passes(kernel):
    report = check(kernel)
    assert report.ok, report


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_named_by_the_right_case(bug):
    assert _first_failure(Kernel(bug), BUGS[bug]) == BUGS[bug]


@pytest.mark.parametrize("bug", WRITING_BUGS)
def test_a_bug_of_a_write_is_named_by_the_right_case(bug):
    assert _first_failure(WritingKernel(bug), WRITING_BUGS[bug]) == WRITING_BUGS[bug]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_weight_that_is_wrong_by_1_percent_is_named(dtype):
    for bug, status in (("", "passed"), ("weighs a key 1 % more", "failed")):
        report = check(Kernel(bug), CLAIMS.replace(dtypes=(dtype,)), cases=["weights"])
        assert [each.status for each in report.results] == [status], report


@pytest.mark.parametrize(
    ("setting", "change"),
    [
        ("default dtype", lambda: torch.set_default_dtype(torch.float64)),
        ("default device", lambda: torch.set_default_device("meta")),
        ("grad mode", lambda: torch.set_grad_enabled(True)),
        ("deterministic debug mode", lambda: torch.use_deterministic_algorithms(True)),
        ("precision of float32 matmuls", lambda: torch.set_float32_matmul_precision("high")),
        ("number of threads", lambda: torch.set_num_threads(torch.get_num_threads() + 1)),
        ("state of the default generator", lambda: torch.rand(1)),
    ],
)
def test_a_change_of_torch_is_named_and_undone(setting, change):
    kernel = Kernel()

    def op(query, key_cache, value_cache, block_table, seq_lens, query_start_loc, scale):
        step = block_table, seq_lens, query_start_loc, scale
        out, _ = kernel(query, key_cache, value_cache, *step)
        change()
        return out

    def precision():
        of_onednn = torch.backends.mkldnn.matmul.fp32_precision
        return torch.get_float32_matmul_precision(), of_onednn

    before, precision_before = settings("cpu"), precision()
    report = check(op, Capabilities(**SIZES), cases=["global_state", "decode", "same_buffers"])
    assert [each.case.name for each in report.failed] == ["global_state"]
    assert f"the call changed the {setting}" in report.failed[0].message
    assert changed(before, settings("cpu")) is None
    assert precision() == precision_before


def _first_failure(kernel, expected: str) -> str | None:
    """The first case that fails; later ones do not run, nor does the slow one."""
    subject = Subject.of(kernel)
    for case in CASES:
        if case.name == "long_context" != expected:
            continue
        if run_case(subject, case, may_shrink=False).status == "failed":
            return case.name
    return None


def test_a_rotation_by_another_position_is_named():
    def op(q, k_cache, v_cache, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
           block_table=None, **options):  # fmt: skip
        tables = None if rotary_cos is None else rotary_cos.roll(1, 0)
        return flash_attn_with_kvcache(
            q, k_cache, v_cache, rotary_cos=tables, rotary_sin=rotary_sin,
            cache_seqlens=cache_seqlens, block_table=block_table, kernel="portable", **options,
        )  # fmt: skip

    claims = Capabilities({"chunked", "append", "rotary"}, **SIZES)
    report = check(op, claims, cases=["chunked", "append", "rotary"])
    assert [each.case.name for each in report.failed] == ["rotary"]


def test_partitions_that_lose_a_key_are_named():
    def op(out, exp_sum, max_logits, tmp_out, query, key_cache, value_cache, num_kv_heads, scale,
           block_tables, seq_lens, block_size, max_seq_len, alibi_slopes, *rest):  # fmt: skip
        short = torch.where(seq_lens > 512, seq_lens - 1, seq_lens)
        args = (query, key_cache, value_cache, num_kv_heads, scale, block_tables, short)
        paged_attention_v2(
            out, exp_sum, max_logits, tmp_out, *args, block_size, max_seq_len, alibi_slopes, *rest
        )

    report = check(op, Capabilities(**SIZES))
    assert [each.case.name for each in report.failed] == ["long_context"]
