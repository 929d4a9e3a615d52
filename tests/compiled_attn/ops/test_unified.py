"""Unified attention on the native kernel: what the three parts give, written the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from compiled_attn import BatchBuilder, PagedKVCache, Request, UnifiedAttention, unified_attention
from compiled_attn.attention.dense import attend
from compiled_attn.ops import KernelArgumentError
from compiled_attn.step import TableBatch
from tests.compiled_attn.attention.test_isolation import FEATURES

BLOCK, HEADS, KV_HEADS, DIM = 4, 4, 2, 16
REQUESTS = [
    Request([1], 9, [3, 8, 5]),
    Request([1, 2, 3, 4, 5], 4, [3, 7, 6]),
    Request([7], 0, [9]),
    Request([1, 2, 3], 0, [11]),
    Request([5, 6], 13, [12, 13, 14, 15]),
]
KINDS = {
    "float32": {},
    "bfloat16": {"dtype": torch.bfloat16},
    "int8": {"cache": torch.int8},
    "e4m3 of bfloat16": {"cache": torch.float8_e4m3fn, "dtype": torch.bfloat16},
    "latents": {"latents": True},
    "latents in int8": {"latents": True, "cache": torch.int8},
}


pytestmark = pytest.mark.usefixtures("compiler")


def _metadata(tokens: int = 16, requests: int = 7):
    """One padded step, as parts and by request."""
    builder = BatchBuilder(20, BLOCK)
    parts = builder.build(REQUESTS, {"tokens": tokens, "shared": 12, "unique": 8, "logits": 7})
    tables = builder.plan_tables(REQUESTS).fill({"tokens": tokens, "requests": requests}, 6)
    both = tables.metadata(BLOCK)
    return replace(
        parts.metadata(BLOCK),
        block_tables=both.block_tables,
        seq_lens=both.seq_lens,
        query_start_loc=both.query_start_loc,
    )


def _call(kind: dict, seed: int = 0) -> dict:
    gen = torch.Generator().manual_seed(seed)
    dtype, latents = kind.get("dtype", torch.float32), kind.get("latents", False)
    kv_heads = 1 if latents else KV_HEADS
    cache = PagedKVCache(
        1, 20, BLOCK, kv_heads, DIM, dtype=kind.get("cache", dtype), has_value=not latents
    )
    for name, buffer in cache.named_buffers():
        random = torch.rand(buffer.shape, generator=gen) * 2 - 1
        buffer.copy_(random.abs() / 50 if "scale" in name else (random * 60).to(buffer.dtype))
        if not cache.is_quantised:
            buffer.copy_(random)
    query, key, value = (
        torch.randn(16, heads, DIM, generator=gen).to(dtype)
        for heads in (HEADS, kv_heads, kv_heads)
    )
    call = {"query": query, "key": key, "value": None if latents else value}
    call |= {"key_cache": cache.key(0), "value_cache": None if latents else cache.value(0)}
    call |= {"key_scale": cache.key_scale(0), "value_scale": cache.value_scale(0), "scale": 0.25}
    if latents:
        call["value_projection"] = torch.randn(HEADS, 12, 5, generator=gen)
    return call


def _copied(call: dict) -> dict:
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in call.items()}


@pytest.mark.parametrize("options", FEATURES)
@pytest.mark.parametrize(("kind", "fused_write"), [*zip(KINDS, (True, False) * 3, strict=True)])
def test_native_and_portable_give_and_write_the_same(kind, options, fused_write):
    call, metadata = _call(KINDS[kind]), _metadata()
    other = _copied(call)
    chosen = {**FEATURES[options], "metadata": metadata, "return_lse": True}
    out, lse = unified_attention(**call, **chosen, kernel="native", fused_write=fused_write)
    want, want_lse = unified_attention(**other, **chosen, kernel="portable")
    near = 3e-2 if call["query"].dtype == torch.bfloat16 else 3e-5
    torch.testing.assert_close(out, want, rtol=near, atol=near)
    torch.testing.assert_close(lse, want_lse, rtol=1e-2 if near > 1e-3 else 1e-5, atol=near)
    for name in ("key_cache", "value_cache", "key_scale", "value_scale"):
        if call[name] is not None:
            mine, theirs = (x[BLOCK:].view(torch.uint8) for x in (call[name], other[name]))
            assert torch.equal(mine, theirs)  # block 0 takes what padding writes


def test_the_step_by_request_is_all_that_native_needs():
    call, tables = _call({}), BatchBuilder(20, BLOCK).plan_tables(REQUESTS)
    bucket = {"tokens": 16, "requests": 8}
    metadata = tables.fill(bucket, 5).metadata(BLOCK)
    out = unified_attention(**_copied(call), metadata=metadata, sliding_window=5, kernel="native")
    want = unified_attention(**_copied(call), metadata=_metadata(), sliding_window=5)
    torch.testing.assert_close(out, want, rtol=3e-5, atol=3e-5)
    assert tables.need == {"tokens": 12, "requests": 5}
    assert not out[12:].any()
    with pytest.raises(ValueError, match="by request alone"):
        unified_attention(**call, metadata=metadata, kernel="portable")


def test_auto_is_native_for_metadata_by_request_and_portable_without():
    call, metadata = _call({}), _metadata()
    parts = replace(metadata, block_tables=None, seq_lens=None, query_start_loc=None)
    auto = unified_attention(**_copied(call), metadata=metadata)
    native = unified_attention(**_copied(call), metadata=metadata, kernel="native")
    portable = unified_attention(**_copied(call), metadata=parts)
    assert torch.equal(auto, native) and not torch.equal(auto, portable)
    before = call["key_cache"].clone()
    with pytest.raises(KernelArgumentError, match="takes metadata by request"):
        unified_attention(**call, metadata=parts, kernel="native")
    assert torch.equal(call["key_cache"], before)


def _strided(call: dict) -> None:
    for name in ("key_cache", "value_cache"):
        call[name] = call[name].transpose(1, 2).contiguous().transpose(1, 2)


def _values_in_bfloat16(call: dict) -> None:
    call["value_cache"] = call["value_cache"].bfloat16()


def _values_in_int8(call: dict) -> None:
    for name, dtype in (("key", torch.float8_e4m3fn), ("value", torch.int8)):
        call[f"{name}_cache"] = torch.zeros(call[f"{name}_cache"].shape, dtype=dtype)
        call[f"{name}_scale"] = torch.ones(call[f"{name}_cache"].shape[:2])


def _learned(name: str):
    def change(call: dict) -> None:
        call[name] = (call[name] if name in call else torch.zeros(HEADS)).requires_grad_()

    return change


REFUSED = {
    "strides": (_strided, "reads caches whose last stride is 1"),
    "values in bfloat16": (_values_in_bfloat16, "has keys and values of one dtype"),
    "values in int8": (_values_in_int8, "has keys and values of one dtype"),
    "gradients of queries": (_learned("query"), "has no gradients"),
    "gradients of keys": (_learned("key"), "has no gradients"),
    "gradients of sinks": (_learned("sinks"), "has no gradients"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_native_refuses_auto_computes_with_the_portable_kernel(name):
    change, match = REFUSED[name]
    outs = []
    for kernel in ("native", "portable", "auto"):
        call = _call({})
        change(call)
        if kernel == "native":
            before = call["key_cache"].clone()
            with pytest.raises(KernelArgumentError, match=match):
                unified_attention(**call, metadata=_metadata(), kernel=kernel)
            assert torch.equal(call["key_cache"].float(), before.float())
        else:
            outs.append(unified_attention(**call, metadata=_metadata(), kernel=kernel))
    assert torch.equal(*outs) and outs[1].requires_grad == ("gradients" in name)


def test_native_takes_learned_tensors_without_gradients():
    call = _call({})
    call["query"].requires_grad_()
    with torch.no_grad():
        out = unified_attention(**call, metadata=_metadata(), kernel="native")
    assert not out.requires_grad and out.any()


def test_an_unknown_kernel_is_an_error():
    with pytest.raises(ValueError, match="expected a kernel of"):
        unified_attention(**_call({}), metadata=_metadata(), kernel="fast")


def test_a_layer_compiles_in_one_graph_whatever_the_step_holds():
    torch._dynamo.reset()
    cache = PagedKVCache(1, 20, BLOCK, KV_HEADS, DIM)
    layer = UnifiedAttention(cache, kernel="native", sliding_window=5)
    call = _call({})
    for name in ("key", "value"):
        cache.get_buffer(f"{name}_0").copy_(call[f"{name}_cache"])

    def run(query, key, value, *step):
        return layer(query, key, value, TableBatch(*step).metadata(BLOCK))

    compiled = torch.compile(run, fullgraph=True, dynamic=False)
    tables = BatchBuilder(20, BLOCK).plan_tables(REQUESTS).fill({"tokens": 16, "requests": 8}, 6)
    padding = TableBatch.padding({"tokens": 16, "requests": 8}, 6)
    inputs = call["query"], call["key"], call["value"]
    with torch.no_grad():
        assert not compiled(*inputs, *padding).any()
        want = unified_attention(**_copied(call), metadata=_metadata(), sliding_window=5)
        out = compiled(*inputs, *tables)
    torch.testing.assert_close(out, want, rtol=3e-5, atol=3e-5)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_layer_that_does_not_write_itself_is_a_region_of_a_step_by_request(backend):
    torch._dynamo.reset()
    cache = PagedKVCache(2, 20, BLOCK, KV_HEADS, DIM)
    layers = [UnifiedAttention(cache, n, kernel="native", fused_write=False) for n in (0, 1)]
    call = _call({})
    for name in ("key", "value"):
        for layer in (0, 1):
            cache.get_buffer(f"{name}_{layer}").copy_(call[f"{name}_cache"])

    @torch.compiler.nested_compile_region
    def region(layer, query, key, value, metadata):
        return layer(query, key, value, metadata)

    def run(query, key, value, *step):
        metadata = TableBatch(*step).metadata(BLOCK)
        return [region(layer, query, key, value, metadata) for layer in layers]

    tables = BatchBuilder(20, BLOCK).plan_tables(REQUESTS).fill({"tokens": 16, "requests": 8}, 6)
    compiled = torch.compile(run, backend=backend, fullgraph=True, dynamic=False)
    with torch.no_grad():
        want = unified_attention(**_copied(call), metadata=_metadata())
        outs = compiled(call["query"], call["key"], call["value"], *tables)
    for out in outs:
        torch.testing.assert_close(out, want, rtol=3e-5, atol=3e-5)


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_gradients_by_default_are_those_of_the_reference(name):
    """torch's fused kernel has none of the log-sum-exp, which the parts are merged by."""
    grads = []
    for options in ({}, {"attend": attend}):
        call = _call({"dtype": torch.float64})
        call[name].requires_grad_()
        unified_attention(**call, metadata=_metadata(), **options).square().sum().backward()
        grads.append(call[name].grad)
    torch.testing.assert_close(*grads)
    assert grads[0].any()


def test_a_bucket_or_a_width_that_is_too_small_is_an_error():
    plan = BatchBuilder(20, BLOCK).plan_tables(REQUESTS)
    for bucket, width in (({"tokens": 11, "requests": 8}, 6), ({"tokens": 16, "requests": 4}, 6)):
        with pytest.raises(ValueError, match="expected a bucket that holds"):
            plan.fill(bucket, width)
    with pytest.raises(ValueError, match=r"expected a bucket that holds \{'width': 4\}"):
        plan.fill({"tokens": 16, "requests": 8}, 3)
