"""`flash_attn_with_kvcache` and `paged_attention_v1` forced onto the native kernel, and refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compiled_attn.compat.flash import flash_attn_with_kvcache, flash_attn_with_kvcache_reference
from compiled_attn.compat.paged import (
    PagedAttention,
    convert_key,
    convert_value,
    paged_attention_v1,
    paged_attention_v2,
)
from compiled_attn.ops import KernelArgumentError
from compiled_attn.ops.paged_attention import call_op
from tests.compiled_attn.compat.flash.cases import Case

pytestmark = pytest.mark.usefixtures("compiler")


FLASH: dict[str, dict[str, Any]] = {
    "decode of pages": {"page_size": 4, "new": 1, "causal": True},
    "decode of rows": {"new": 1, "causal": True},
    "rows by index": {"new": 1, "batch_idx": True},
    "pages by index": {"new": 2, "queries": 2, "page_size": 4, "batch_idx": True, "causal": True},
    "not causal": {"queries": 5, "page_size": 7, "new": 3},
    "more queries than keys": {"queries": 9, "lengths": [2, 0], "causal": True},
    "window": {"queries": 4, "new": 4, "window": (5, 0), "page_size": 4},
    "causal window": {"queries": 4, "new": 4, "window": (5, 7), "causal": True},
    "softcap": {"queries": 3, "new": 3, "softcap": 2.0, "page_size": 3},
    "ALiBi": {"queries": 3, "new": 3, "alibi": "heads", "causal": True, "page_size": 5},
    "rotary": {"new": 1, "dim": 32, "rotary": 16, "causal": True, "page_size": 4},
    "rotary of a prompt": {"new": 6, "queries": 6, "dim": 32, "rotary": 32, "causal": True},
    "fused cache": {"new": 2, "page_size": 7, "storage": "fused", "queries": 2},
    "transposed cache": {"new": 1, "page_size": 16, "storage": "transposed"},
}


@pytest.mark.parametrize("name", FLASH)
def test_flash_on_the_native_kernel_is_the_reference(name):
    case = Case(**FLASH[name]).make()
    before = case.bits()
    want, want_lse = case.run(flash_attn_with_kvcache_reference)
    written = case.bits()
    case.restore(before)
    out, lse = case.run(flash_attn_with_kvcache, kernel="native")
    assert torch.equal(case.bits(), written)
    torch.testing.assert_close(out, want, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(lse, want_lse.to(lse.dtype), rtol=2e-5, atol=2e-5)
    case.restore(before)
    auto, _ = case.run(flash_attn_with_kvcache)
    assert torch.equal(auto, out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_flash_in_half_precision_is_as_near_as_plain_attention(dtype):
    case = Case(dtype=dtype, new=1, causal=True, page_size=4, dim=64, capacity=200).make()
    before = case.bits()
    out, _ = case.run(flash_attn_with_kvcache, kernel="native")
    case.restore(before)
    case.run(flash_attn_with_kvcache_reference)
    exact, plain = case.expected()[0], case.expected(low=True)[0]
    error = (out.double() - exact).abs().max()
    assert error <= 3 * (plain.double() - exact).abs().max() + 1e-5


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a left pad": ({"leftpad": True}, "has no left pad"),
    "a window to the right": ({"window": (2, 1)}, r"no window of \(2, 1\)"),
    "a window open to the right": ({"window": (2, -1)}, r"no window of \(2, -1\)"),
    "slopes of each row": ({"alibi": "rows", "causal": True}, "for all rows alike"),
    "ALiBi without causal": ({"alibi": "heads"}, "for causal attention only"),
    "float64": ({"dtype": torch.float64}, "not in torch.float64"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_flash_says_what_the_native_kernel_lacks_and_auto_serves_it(name):
    sizes, match = REFUSED[name]
    case = Case(new=1, **sizes).make()
    before = case.bits()
    with pytest.raises(KernelArgumentError, match=match):
        case.run(flash_attn_with_kvcache, kernel="native")
    assert torch.equal(case.bits(), before)
    out, _ = case.run(flash_attn_with_kvcache)
    assert torch.isfinite(out).all()


def _paged(layout: str, kv_cache_dtype: str = "auto", seed: int = 0) -> dict[str, Any]:
    gen = torch.Generator().manual_seed(seed)
    stored = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}.get(kv_cache_dtype, torch.float32)
    key, value = (torch.randn(12, 4, 2, 16, generator=gen) for _ in range(2))
    if stored != torch.float32:
        key, value = ((x * 20).clamp(-100, 100).to(stored) for x in (key, value))
    key = convert_key(key, "NHD", layout, block_size=4).contiguous()
    value = convert_value(value, "NHD", layout, block_size=4).contiguous()
    tables = torch.tensor([[3, 5, 999], [7, -1, 999], [1, 2, 4]])
    return {
        "query": torch.randn(3, 4, 16, generator=gen),
        "key_cache": key,
        "value_cache": value,
        "num_kv_heads": 2,
        "scale": 0.25,
        "block_tables": tables.int(),
        "seq_lens": torch.tensor([7, 0, 12]).int(),
        "block_size": 4,
        "max_seq_len": 12,
        "alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0]),
        "kv_cache_dtype": kv_cache_dtype,
        "k_scale": 1.0 if kv_cache_dtype == "auto" else torch.tensor([0.05, 0.1]),
        "v_scale": 1.0 if kv_cache_dtype == "auto" else 0.07,
        "layout": layout,
    }


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "int8"])
@pytest.mark.parametrize("layout", ["flat", "NHD", "HND"])
def test_paged_attention_on_the_native_kernel_is_the_portable_one(layout, kv_cache_dtype):
    arguments = _paged(layout, kv_cache_dtype)
    out, want, auto = (torch.full((3, 4, 16), 9.0) for _ in range(3))
    paged_attention_v1(out, **arguments, kernel="native")
    paged_attention_v1(want, **arguments, kernel="portable")
    paged_attention_v1(auto, **arguments)
    torch.testing.assert_close(out, want, rtol=2e-5, atol=2e-5)
    assert torch.equal(auto, out) and not out[1].any()


def test_paged_attention_says_what_the_native_kernel_lacks():
    out = torch.zeros(3, 4, 16)
    with pytest.raises(KernelArgumentError, match="not packed"):
        paged_attention_v1(out, **_paged("packed"), kernel="native")
    sums, parts = torch.zeros(3, 4, 1), torch.zeros(3, 4, 1, 16)
    with pytest.raises(KernelArgumentError, match="no partitions"):
        paged_attention_v2(out, sums, sums, parts, **_paged("NHD"), kernel="native")
    assert not out.any()
    paged_attention_v2(out, sums, sums.clone(), parts, **_paged("NHD"))
    assert out.any()


def test_the_paged_module_writes_and_attends_on_either_kernel():
    outs = []
    for kernel in ("native", "portable"):
        arguments = _paged("HND")
        module = PagedAttention(
            arguments["key_cache"], arguments["value_cache"], 2, 4, 0.25,
            layout="HND", kernel=kernel,
        )  # fmt: skip
        gen = torch.Generator().manual_seed(1)
        key, value = (torch.randn(3, 2, 16, generator=gen) for _ in range(2))
        slots = torch.tensor([5 * 4 + 2, -1, 4 * 4 + 3])
        step = arguments["query"], arguments["block_tables"], arguments["seq_lens"]
        outs.append(module(*step, key, value, slots))
    torch.testing.assert_close(*outs, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["paged_attention", "paged_attention_"])
def test_what_the_kernel_refuses_is_an_error_of_arguments_and_no_other_is(name):
    def raising(error: Exception):
        def op(*_: object, **__: object) -> None:
            raise error

        return op

    sentence = f"{name}: expected block_table[0, 0] in 0..3, got 9: look"
    with pytest.raises(KernelArgumentError, match="block_table"):
        call_op(raising(RuntimeError(sentence)), 1, scale=2)
    others = (
        RuntimeError("renorm: expected maxnorm to be >= 0"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory"),
        ValueError(sentence),
        KernelArgumentError(sentence),
    )
    for error in others:
        with pytest.raises(type(error)) as raised:
            call_op(raising(error))
        assert raised.value is error
    assert call_op(lambda x, *, y: x + y, 1, y=2) == 3
