"""This project's own functions pass the kit with all that they claim."""

from __future__ import annotations

import pytest
import torch

from compiled_attn.testing import Capabilities, check
from compiled_attn.testing.kit import own
from tests.compiled_attn.ops.kernels import BEST, ON_DEVICES, SLOW, loaded

QUICK = {"dtypes": (torch.float32, torch.bfloat16), "head_dims": (32,)}


@pytest.mark.parametrize("name", own.CAPABILITIES)
def test_a_function_passes_all_cases_that_it_claims(name):
    claims = own.CAPABILITIES[name].replace(**QUICK)
    report = check(getattr(own, name), claims)
    assert report.ok, report


@pytest.mark.parametrize("kernel", [BEST, *SLOW, *ON_DEVICES])
@pytest.mark.parametrize("interface", ["op", "op_write"])
def test_a_kernel_passes_what_the_reference_claims(interface, kernel):
    name = "paged_attention_" if interface == "op_write" else "paged_attention"
    claims = own.CAPABILITIES[name].replace(**QUICK)
    report = check(getattr(loaded(kernel), name), claims, interface)
    assert report.ok, report


@pytest.mark.parametrize(
    ("name", "interface"), [("flash_attn_with_kvcache", "flash"), ("unified_attention", "unified")]
)
def test_a_function_passes_without_the_native_kernel(name, interface):
    def op(*args, **kwargs):
        return getattr(own, name)(*args, kernel="portable", **kwargs)

    claims = own.CAPABILITIES[name].replace(**QUICK)
    report = check(op, claims, interface)
    assert report.ok, report


def test_a_claim_too_much_fails():
    claims = Capabilities({"int64_tables"}, head_dims=(16,), block_sizes=(4,), groups=(1,))
    report = check(own.paged_attention, claims, cases=["int64"])
    assert not report.ok and "expected block_table of dtype int32" in report.failed[0].message
