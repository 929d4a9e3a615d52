"""Partial attention over blocks: which query reads them, what is not read, quantised ones."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_attn.attention.dense import attend
from compiled_attn.attention.merge import lse, merge
from compiled_attn.attention.nonfinite import sum_of_parts
from compiled_attn.attention.parts import partial_attn_shared, partial_attn_unique
from compiled_attn.attention.sdpa import SdpaKernel
from compiled_attn.attention.state import FMIN, PartialAttention
from compiled_attn.cache.kv_cache import gather_blocks, usage_bias
from compiled_attn.cache.quantisation import QUANTISED, dequantise, quantise
from tests.compiled_attn.attention.unified_run import random_qkv
from tests.oracle import attend as dense_under


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def test_unique_blocks_reduce_to_their_query_and_padding_adds_nothing():
    q, key_cache, value_cache = random_qkv(3, 32)
    key_cache[:4] = value_cache[:4] = math.nan
    blocks = torch.tensor([5, 1, 7, 0, 0])
    mapping = torch.tensor([2, 0, 2, 0, 0])
    usage = torch.tensor([4, 3, 1, 0, 0])
    part = partial_attn_unique(
        q, key_cache, value_cache, blocks, mapping, usage_bias(usage, 4), 4, scale=0.5
    )
    seen = torch.full((3, 32), -math.inf)
    seen[2, 20:24], seen[0, 4:7], seen[2, 28:29] = 0, 0, 0
    key_cache[:4] = value_cache[:4] = 0
    out, expected_lse = dense_under(q, key_cache, value_cache, seen, scale=0.5)
    torch.testing.assert_close(merge(part).double(), out, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(lse(part).double(), expected_lse, atol=1e-5, rtol=1e-4)
    assert lse(part)[1].eq(-math.inf).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("fmin", [FMIN, -1e4])
def test_padding_of_a_row_that_is_not_listed_adds_nothing(dtype, fmin):
    """Padded blocks belong to row 0, which may have no blocks: whatever the floor, it is no NaN."""
    q, k, v = (tensor.to(dtype) for tensor in random_qkv(3, 20))
    blocks, mapping = torch.tensor([1, 0]), torch.tensor([2, 0])
    part = partial_attn_unique(
        *(q, k, v, blocks, mapping, usage_bias(torch.tensor([4, 0]), 4), 4, fmin),
        queries_used=torch.tensor([2, -1]),
    )
    out, expected_lse = dense_under(q[2:], k[4:8], v[4:8], torch.zeros(1, 4))
    torch.testing.assert_close(merge(part)[2:].double(), out, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(lse(part)[2:].double(), expected_lse, atol=1e-5, rtol=1e-4)
    assert not merge(part)[:2].any() and lse(part)[:2].eq(-math.inf).all()


def test_blocks_of_a_row_that_is_not_listed_do_not_reach_the_others():
    q, k, v = random_qkv(3, 20)
    blocks, mapping, bias = torch.tensor([1, 2]), torch.tensor([2, 0]), torch.zeros(2, 4)
    k[8:12] *= 1e4  # scores that exp() of would be infinite
    part = partial_attn_unique(q, k, v, blocks, mapping, bias, 4, queries_used=torch.tensor([2]))
    out, _ = dense_under(q[2:], k[4:8], v[4:8], torch.zeros(1, 4))
    torch.testing.assert_close(merge(part)[2:].double(), out, atol=1e-5, rtol=1e-4)
    assert not merge(part)[:2].any()


@pytest.mark.parametrize("dtype", QUANTISED)
@pytest.mark.parametrize("value_dim", [8, 5])
def test_quantised_blocks_are_what_their_codes_and_scales_say(dtype, value_dim):
    q, k, v = random_qkv(3, 40, value_dim=value_dim)
    (key, key_scale), (value, value_scale) = quantise(k, dtype), quantise(v, dtype)
    plain = dequantise(key, key_scale), dequantise(value, value_scale)
    for scale in (key_scale, value_scale):
        scale[:4] = math.nan  # the null block
        scale[21:24] = math.inf  # the rest of a block that is used in part
    blocks, usage = torch.tensor([5, 9, 3, 0]), torch.tensor([1, 4, 4, 0])
    scales = {"key_scale": key_scale, "value_scale": value_scale}
    mapping = torch.tensor([2, 0, 2, 0])
    for form, step in (
        (partial_attn_shared, (blocks, usage.expand(3, -1))),
        (partial_attn_unique, (blocks, mapping, usage_bias(usage, 4))),
    ):
        ours, theirs = form(q, key, value, *step, 4, **scales), form(q, *plain, *step, 4)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        assert merge(ours).isfinite().all()


def test_an_int_of_unique_blocks_reads_the_first_blocks_of_the_cache():
    q, key_cache, value_cache = random_qkv(2, 20)
    mapping, bias = torch.tensor([0, 1, 0]), torch.zeros(3, 4)
    first = partial_attn_unique(q, key_cache, value_cache, 3, mapping, bias, 4)
    listed = partial_attn_unique(q, key_cache, value_cache, torch.arange(3), mapping, bias, 4)
    assert all(torch.equal(a, b) for a, b in zip(first, listed, strict=True))


@pytest.mark.parametrize("usage", [torch.int32, torch.int64])
def test_a_usage_beyond_a_block_is_all_of_it_and_a_negative_one_nothing(usage):
    bias = usage_bias(torch.tensor([9, -2, 2], dtype=usage), 3)
    assert bias.tolist() == [[0, 0, 0], [-math.inf] * 3, [0, 0, -math.inf]]


@pytest.mark.parametrize("kernel", [attend, SdpaKernel.attend])
def test_lengths_say_what_is_read_as_numbers(kernel):
    """A slot that no query sees changes nothing; one that is seen is a zero from the length on."""
    q, k, v = random_qkv(2, 8)
    blocks, bias = torch.tensor([0]), torch.zeros(2, 1, 4)
    bias[0, 0, 3] = -math.inf

    def part(length: int | None) -> PartialAttention:
        lengths = None if length is None else torch.tensor([length])
        return partial_attn_shared(q, k, v, blocks, bias, 4, lengths=lengths, attend=kernel)

    clean = merge(part(4))
    k[3], v[3] = math.nan, math.nan
    for read in (merge(part(4)), merge(part(None))):
        assert torch.equal(read[0], clean[0])  # does not see it: whatever its weight of 0 meets
        assert read[1].isnan().all()
    left_out = merge(part(3))
    assert torch.equal(left_out[0], clean[0]) and left_out.isfinite().all()


@given(st.integers(0, 2**32))
@settings(max_examples=40)
def test_sums_of_parts_are_those_of_each_row_alone(seed):
    torch.manual_seed(seed)
    parts, owner = torch.randn(9, 2, 3), torch.randint(0, 4, (9,))
    poison = torch.tensor([math.nan, math.inf, -math.inf, 3e38, 0.0])[torch.randint(0, 5, (9,))]
    parts = torch.where(torch.rand(9, 2, 3) < 0.2, poison.view(-1, 1, 1), parts)
    uses = torch.arange(4).unsqueeze(1) == owner
    sums = sum_of_parts(uses, parts)
    for row in range(4):
        own = parts[owner == row]
        bad = (~own.isfinite() | (own == 3e38)).any(0)
        want = torch.where(bad, 0, own).sum(0)
        assert torch.equal(sums[row].isnan(), bad)
        torch.testing.assert_close(sums[row].nan_to_num(0.0), torch.where(bad, 0, want))


def test_gathered_blocks_have_zeros_where_nothing_is_stored():
    cache = torch.full((12, 1, 2), math.nan)
    cache[4:6] = 1.0
    gathered = gather_blocks(cache, torch.tensor([1, 0]), usage_bias(torch.tensor([2, 0]), 4) == 0)
    assert gathered[0, :2].eq(1).all() and gathered[0, 2:].eq(0).all() and gathered[1].eq(0).all()
