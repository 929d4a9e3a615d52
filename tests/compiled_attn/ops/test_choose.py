"""The choice of an implementation: the first that can, and the reasons where none can."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from compiled_attn.attention.by_parts import DENSE_KERNELS
from compiled_attn.ops import (
    AttentionTraits,
    KernelArgumentError,
    NativeKernel,
    NativeUnavailable,
    choose,
)
from compiled_attn.ops.choose import chooses_native
from compiled_attn.ops.triton import register
from graphs.installation import install_command

PLAIN = AttentionTraits("cpu", torch.float32, (torch.float32, torch.float32))
HALF, INT8, E4M3 = torch.float16, torch.int8, torch.float8_e4m3fn

LACKS = {
    "metadata in parts alone": ({"by_request": False}, "metadata by request"),
    "partitions": ({"partitions": True}, "no partitions"),
    "a left pad": ({"left_pad": True}, "no left pad"),
    "gradients": ({"gradients": True}, "no gradients"),
    "packed caches": ({"layout": "packed"}, "not packed"),
    "strided caches": ({"unit_stride": False}, "last stride is 1"),
    "a window to the right": ({"window": (3, 1)}, r"no window of \(3, 1\)"),
    "a left window that is not causal": ({"window": (3, -1)}, r"no window of \(3, -1\)"),
    "slopes of rows": ({"alibi": 2}, "for all rows alike"),
    "slopes of what is not causal": ({"alibi": 1, "window": (-1, -1)}, "causal attention only"),
    "another device": ({"device": "hpu"}, "runs on cpu and cuda, not on hpu"),
    "float64": ({"dtype": torch.float64}, "not in torch.float64"),
    "a cache of another float": ({"cache_dtypes": (HALF, HALF)}, "no cache of torch.float16"),
    "caches of two dtypes": ({"cache_dtypes": (INT8, E4M3)}, "keys and values of one dtype"),
}


class Missing(NativeKernel):
    """A kernel that could serve anything, elsewhere."""

    name = "missing"

    def supports(self, traits: AttentionTraits) -> str | None:
        return None

    def unavailable(self, traits: AttentionTraits) -> str | None:
        return "needs another machine"


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA tensors have a kernel here")
def test_for_cuda_tensors_it_says_what_triton_lacks(monkeypatch):
    traits = replace(PLAIN, device="cuda")
    assert NativeKernel().supports(traits).startswith("runs on cuda by Triton, ")
    assert not chooses_native("auto", traits)
    monkeypatch.setattr(register, "find_spec", lambda name: None)
    assert install_command("triton") in NativeKernel().supports(traits)
    monkeypatch.setattr(register, "find_spec", lambda name: name)
    assert NativeKernel().supports(traits).endswith("torch sees no CUDA device here")


@pytest.mark.parametrize("name", LACKS)
def test_the_native_kernel_says_what_it_lacks(name):
    changes, reason = LACKS[name]
    traits = replace(PLAIN, **changes)
    with pytest.raises(KernelArgumentError, match=f"got none: native .*{reason}"):
        chooses_native("native", traits)
    assert not chooses_native("auto", traits) and not chooses_native("portable", traits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_it_supports_needs_no_build_to_be_said(dtype):
    for cache in (dtype, INT8, E4M3, torch.float8_e5m2):
        traits = replace(PLAIN, dtype=dtype, cache_dtypes=(cache, cache), softcap=True, alibi=1)
        assert NativeKernel().supports(traits) is None


def test_a_step_by_request_alone_that_the_native_kernel_lacks_is_refused_with_both_reasons():
    traits = replace(PLAIN, gradients=True, by_parts=False)
    with pytest.raises(KernelArgumentError, match="native has no gradients; portable takes meta"):
        chooses_native("auto", traits)


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"gradients": True}, r"call it under torch\.no_grad\(\)"),
        ({"dtype": torch.float64}, "cast query, key, value and the caches to float32"),
    ],
)
@pytest.mark.parametrize("kernel", ["native", "auto"])
def test_the_remedy_for_a_step_by_request_alone_names_what_helps(kernel, changes, remedy):
    """The choice of another kernel alone does not: plain torch needs the parts."""
    traits = replace(PLAIN, **changes, by_parts=False)
    with pytest.raises(KernelArgumentError, match=remedy + r", or build metadata in parts"):
        chooses_native(kernel, traits)


def test_a_kernel_that_cannot_be_had_is_passed_over_or_unavailable():
    dense = DENSE_KERNELS[-1]
    assert choose(PLAIN, (Missing(), dense)) is dense
    with pytest.raises(NativeUnavailable, match="missing needs another machine"):
        choose(PLAIN, (Missing(),))


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "sdpa"),
        ({"softcap": True}, "reference"),
        ({"device": "hpu"}, "reference"),
        ({"gradients": True}, "reference"),
    ],
)
def test_the_parts_take_the_fused_kernel_where_it_can(changes, name):
    assert choose(replace(PLAIN, **changes), DENSE_KERNELS).name == name
