"""The partial attentions and their merge, against dense attention over all keys."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_attn.attention.dense import attend
from compiled_attn.attention.merge import lse, merge, merge_online
from compiled_attn.attention.parts import (
    partial_attn_causal,
    partial_attn_shared,
    partial_attn_sinks,
    partial_attn_unique,
)
from compiled_attn.attention.sdpa import SdpaKernel
from compiled_attn.attention.state import FMIN, PartialAttention
from compiled_attn.cache.kv_cache import usage_bias
from tests.compiled_attn.attention.unified_run import random_qkv
from tests.oracle import attend as dense_under

ATTENDS = [pytest.param(attend, id="reference"), pytest.param(SdpaKernel.attend, id="sdpa")]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("kernel", ATTENDS)
@given(st.integers(0, 2**32), st.integers(1, 9), st.integers(1, 1200), st.integers(1, 3))
@settings(max_examples=25)
def test_attend_equals_dense_attention_with_rows_that_see_nothing(
    kernel, seed, tokens, keys, group
):
    torch.manual_seed(seed)
    q, k, v = random_qkv(tokens, keys, heads=2 * group)
    bias = torch.where(torch.rand(tokens, keys) < 0.1, 0.0, -math.inf)
    part = kernel(q, k, v, bias, scale=0.3)
    out, expected_lse = dense_under(q, k, v, bias, scale=0.3)
    torch.testing.assert_close(merge(part).double(), out, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(lse(part).double(), expected_lse, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kernel", ATTENDS)
def test_a_part_that_sees_nothing_does_not_drown_one_of_very_low_scores(kernel):
    q, k, v = random_qkv(3, 6)
    low, nothing = torch.full((3, 6), -300.0), torch.full((3, 6), -math.inf)
    parts = [kernel(q, k, v, bias, scale=1.0) for bias in (nothing, low)]
    assert parts[0].max.lt(-1e30).all() and not parts[0].sum.any() and not parts[0].out.any()
    out, expected_lse = dense_under(q, k, v, low)
    for merged in (parts, [merge_online(*parts)]):
        torch.testing.assert_close(merge(*merged).double(), out, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(lse(*merged).double(), expected_lse, atol=1e-4, rtol=1e-4)


HIDDEN = torch.full((5, 7), -math.inf).triu(3)
BIASES = {
    "of each head": torch.stack([HIDDEN, HIDDEN.roll(1, 1), HIDDEN / 2, HIDDEN]),
    "transposed": torch.arange(35.0).view(7, 5).T,
    "float64": HIDDEN.double(),
    "float16": HIDDEN.half(),
}


@pytest.mark.parametrize("kernel", ATTENDS)
@pytest.mark.parametrize(("dim", "value_dim"), [(8, 8), (8, 3), (3, 8), (24, 16), (16, 24)])
@pytest.mark.parametrize("bias", BIASES.values(), ids=BIASES)
def test_attend_takes_any_biases_sizes_and_strides(kernel, dim, value_dim, bias):
    dense = random_qkv(5, 7, dim=dim, value_dim=value_dim)
    q, k, v = (each.permute(2, 0, 1).contiguous().permute(1, 2, 0) for each in dense)
    part = kernel(q, k, v, bias, scale=0.5)
    assert part.out.dtype == part.max.dtype == part.sum.dtype == torch.float32
    out, expected_lse = dense_under(q, k, v, bias, scale=0.5)
    torch.testing.assert_close(merge(part).double(), out, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(lse(part).double(), expected_lse.double(), atol=1e-5, rtol=1e-4)


def test_attend_applies_scale_then_softcap_then_bias():
    q, k, v = random_qkv(3, 6)
    bias = torch.randn(3, 6)
    out = merge(attend(q, k, v, bias, scale=2.0, softcap=0.5)).double()
    torch.testing.assert_close(
        out, dense_under(q, k, v, bias, scale=2.0, softcap=0.5)[0], atol=1e-5, rtol=1e-4
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_long_rows_of_half_precision_do_not_overflow(dtype):
    q, k = torch.zeros(1, 1, 8, dtype=dtype), torch.zeros(70_000, 1, 8, dtype=dtype)
    v = torch.full((70_000, 1, 8), 8.0, dtype=dtype)  # the unnormalised sum is far beyond float16
    out = merge(attend(q, k, v, torch.zeros(1, 70_000), scale=1.0))
    torch.testing.assert_close(out, torch.full((1, 1, 8), 8.0))


@pytest.mark.parametrize("width", [1, 3, 4, 100, None])
@pytest.mark.parametrize("kernel", ATTENDS)
def test_causal_slices_equal_one_dense_causal_attention(kernel, width):
    q, k, v = random_qkv(10, 10)
    bias = torch.full((10, 10), -math.inf).triu(1)
    part = partial_attn_causal(q, k, v, bias, width, attend=kernel)
    torch.testing.assert_close(
        merge(part).double(), dense_under(q, k, v, bias)[0], atol=1e-5, rtol=1e-4
    )


def test_poison_in_padded_rows_does_not_reach_the_causal_part():
    q, k, v = random_qkv(6, 6)
    bias = torch.full((6, 6), -math.inf).triu(1)
    bias[4:], bias[:, 4:] = -math.inf, -math.inf
    clean = merge(partial_attn_causal(q, k, v, bias))
    for kernel in (attend, SdpaKernel.attend):
        for tensor in (q, k, v):
            tensor[4:] = math.nan
        out = merge(partial_attn_causal(q, k, v, bias, attend=kernel))
        torch.testing.assert_close(out, clean)
        assert not out[4:].any()


@pytest.mark.parametrize("chunk", [1, 2, 3, None])
@pytest.mark.parametrize("kernel", ATTENDS)
def test_shared_usages_bias_and_chunks_agree(kernel, chunk):
    q, key_cache, value_cache = random_qkv(5, 40)
    blocks, usage = torch.tensor([7, 2, 9, 0, 4]), torch.randint(0, 5, (5, 5))
    key_cache[0:4] = value_cache[0:4] = math.inf  # the null block
    usage[:, 3] = 0
    bias = usage_bias(usage, 4)
    dense_keys = (blocks[:, None] * 4 + torch.arange(4)).flatten()
    out, _ = dense_under(
        q,
        torch.nan_to_num(key_cache[dense_keys], posinf=0),
        torch.nan_to_num(value_cache[dense_keys], posinf=0),
        bias.flatten(1),
    )
    for form in (usage, bias):
        pieces = [
            partial_attn_shared(
                q, key_cache, value_cache, blocks[part], form[:, part], 4, attend=kernel
            )
            for part in (slice(i, i + (chunk or 5)) for i in range(0, 5, chunk or 5))
        ]
        part = functools.reduce(merge_online, pieces)
        torch.testing.assert_close(merge(part).double(), out, atol=1e-5, rtol=1e-4)


@given(st.integers(0, 2**32), st.integers(1, 5))
@settings(max_examples=30)
def test_merging_any_split_of_the_keys_equals_attention_over_all(seed, splits):
    torch.manual_seed(seed)
    q, k, v = random_qkv(4, 30)
    owner = torch.randint(0, splits, (30,))
    parts = []
    for split in range(splits):
        mine = owner == split
        bias = torch.where(mine, 0.0, -math.inf).expand(4, -1)
        parts.append(attend(q * 20, k, v, bias, scale=1.0))
    out, expected_lse = dense_under(q * 20, k, v, torch.zeros(4, 30))
    online = parts[0]
    for part in parts[1:]:
        online = merge_online(online, part)
    for merged in (merge(*parts), merge(online)):
        torch.testing.assert_close(merged.double(), out, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(lse(*parts).double(), expected_lse, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(lse(online).double(), expected_lse, atol=1e-4, rtol=1e-5)


def test_merging_parts_that_see_nothing_gives_zeros_and_no_nan():
    empty = PartialAttention(torch.zeros(2, 3, 4), torch.full((2, 3), FMIN), torch.zeros(2, 3))
    assert torch.equal(merge(empty, empty), torch.zeros(2, 3, 4))
    assert torch.equal(lse(empty, empty), torch.full((2, 3), -math.inf))


def test_merging_without_any_part_is_an_error():
    with pytest.raises(ValueError, match="at least one part"):
        merge(None, None)


def test_absent_parts_are_none():
    q, k, v = random_qkv(2, 8)
    assert partial_attn_causal(q, k[:2], v[:2], None) is None
    assert partial_attn_shared(q, k, v, None, None, 4) is None
    assert partial_attn_unique(q, k, v, None, None, None, 4) is None
    assert partial_attn_sinks(None, attend(q, k, v, torch.zeros(2, 8), scale=1.0)) is None
    none = torch.zeros(0, dtype=torch.int64)
    assert partial_attn_shared(q, k, v, none, torch.zeros(2, 0, 4), 4) is None
    assert partial_attn_unique(q, k, v, none, none, torch.zeros(0, 4), 4) is None
    assert partial_attn_unique(q, k, v, 0, none, torch.zeros(0, 4), 4) is None


def test_a_sink_takes_weight_but_adds_no_value():
    q, k, v = random_qkv(2, 8)
    part = attend(q, k, v, torch.zeros(2, 8), scale=1.0)
    sinks = torch.tensor([0.3, -1.0, 2.0, 5.0])
    out = merge(part, partial_attn_sinks(sinks, part))
    weight = torch.exp(lse(part)) / (torch.exp(lse(part)) + torch.exp(sinks))
    torch.testing.assert_close(out, merge(part) * weight.unsqueeze(-1))


@pytest.mark.parametrize("kernel", ATTENDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_parts_of_no_queries_are_empty(kernel, dtype):
    q, k, v = (each.to(dtype) for each in random_qkv(0, 8, value_dim=5))
    blocks, one_bias = torch.tensor([0, 1]), torch.full((2, 4), -math.inf)
    parts = [
        partial_attn_causal(q, k[:0], v[:0], torch.zeros(0, 0), width, attend=kernel)
        for width in (None, 2)
    ]
    parts += [
        partial_attn_shared(q, k, v, blocks, bias, 4, attend=kernel)
        for bias in (torch.zeros(0, 2, 4), torch.zeros(0, 2, dtype=torch.int32))
    ]
    parts += [
        partial_attn_unique(q, k, v, blocks, torch.zeros(2, dtype=torch.int64), one_bias, 4)
        for blocks in (blocks, 2)
    ]
    wide = torch.promote_types(dtype, torch.float32)
    for part in parts:
        assert [each.shape for each in part] == [(0, 4, 5), (0, 4), (0, 4)]
        assert {each.dtype for each in part} == {wide}
    assert merge(*parts).shape == (0, 4, 5) and lse(*parts).shape == (0, 4)


def test_a_number_of_queries_that_a_compiler_does_not_know_is_no_guard():
    """It is taken for some: a look at whether it is 0 would be one."""
    query, key, value = random_qkv(3, 5)
    bias = torch.zeros(3, 5)
    for tensor in (query, bias):
        torch._dynamo.decorators.mark_unbacked(tensor, 0)
    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    part = compiled(query, key, value, bias, scale=0.5)
    torch.testing.assert_close(part, attend(query, key, value, bias, scale=0.5))
