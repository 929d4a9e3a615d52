"""Rows in 8 bits against an independent rounding: the nearest of all the codes a dtype has."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compiled_attn.cache.quantisation import QUANTISED, dequantise, encode, largest, quantise
from tests.oracle import LARGEST, store

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def _codes(dtype: torch.dtype) -> Tensor:
    """All finite numbers of a dtype that rounding may give, ascending."""
    every = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    every = every[every.isfinite() & (every.abs() <= LARGEST[dtype])]
    return every.unique()


def _nearest(scaled: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest codes of numbers, found by comparing with each; a tie goes to the even code."""
    codes = _codes(dtype)
    distance = (scaled.double().unsqueeze(-1) - codes).abs()
    ties = distance == distance.amin(-1, keepdim=True)
    # Of two neighbours one has an even last bit.
    bits = codes.to(torch.float32).to(dtype).view(torch.uint8)
    odd = (bits & 1).bool()
    return codes[torch.where(ties, odd.double(), math.inf).argmin(-1)]


def _rows(seed: int, dtype: torch.dtype, spread: float) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = torch.randn(5, 3, 1, generator=generator) * spread
    return (torch.randn(5, 3, 16, generator=generator) * size.exp()).to(dtype)


@pytest.mark.parametrize("dtype", QUANTISED)
@given(st.integers(0, 2**32), st.sampled_from(FLOATS), st.sampled_from([0.0, 1.0, 3.0]))
@settings(max_examples=30)
def test_codes_are_the_nearest_and_the_largest_element_has_the_largest(dtype, seed, source, spread):
    rows = _rows(seed, source, spread)
    codes, scale = quantise(rows, dtype)
    assert codes.dtype == dtype and scale.dtype == torch.float32
    assert codes.shape == rows.shape and scale.shape == rows.shape[:-1]
    scaled = rows.float() / scale.unsqueeze(-1)
    assert torch.equal(codes.double(), _nearest(scaled, dtype))
    assert codes.double().abs().amax(-1).eq(LARGEST[dtype]).all()


@pytest.mark.parametrize("dtype", QUANTISED)
def test_the_library_stores_what_the_oracle_stores(dtype):
    rows = _rows(1, torch.float32, 1.0)
    codes, scale = quantise(rows, dtype)
    stored, scales, read = store(rows, dtype)
    assert torch.equal(codes.view(torch.uint8), stored.view(torch.uint8))
    assert torch.equal(scale, scales) and torch.equal(dequantise(codes, scale), read)


@pytest.mark.parametrize("dtype", QUANTISED)
def test_rows_that_are_quantised_already_stay_as_they_are(dtype):
    once = dequantise(*quantise(_rows(2, torch.float32, 1.0), dtype))
    twice = dequantise(*quantise(once, dtype))
    torch.testing.assert_close(once, twice, atol=0, rtol=3e-7)  # the scale is rounded again


@pytest.mark.parametrize("dtype", QUANTISED)
@pytest.mark.parametrize("source", FLOATS)
def test_rows_of_zeros_and_of_tiny_numbers_are_finite(dtype, source):
    tiny = torch.finfo(source).tiny
    rows = torch.tensor([[0.0, 0.0], [tiny, -tiny], [tiny / 4, 0.0]]).to(source)
    codes, scale = quantise(rows, dtype)
    read = dequantise(codes, scale)
    assert scale.gt(0).all() and scale.isfinite().all()
    assert not read[0].any()
    # Below the smallest scale codes are coarse; the row is off by no more than that scale's step.
    floor = torch.finfo(torch.float32).tiny * 2**16
    assert (read - rows.float()).abs().max() <= max(tiny / 8, floor)


@pytest.mark.parametrize("dtype", QUANTISED)
def test_the_largest_numbers_of_half_precision_survive(dtype):
    rows = torch.tensor([[65504.0, -65504.0, 1.0]], dtype=torch.float16)
    read = dequantise(*quantise(rows, dtype))
    torch.testing.assert_close(read[0, :2], rows[0, :2].float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", QUANTISED)
def test_a_poisoned_row_stays_on_its_own(dtype):
    rows = _rows(3, torch.float32, 0.0)
    clean_codes, clean_scale = quantise(rows, dtype)
    rows[1, 2, 3], rows[4, 0, 0] = math.nan, math.inf
    codes, scale = quantise(rows, dtype)
    same = torch.ones(5, 3, dtype=torch.bool)
    same[1, 2] = same[4, 0] = False
    assert torch.equal(scale[same], clean_scale[same])
    assert torch.equal(codes[same].view(torch.uint8), clean_codes[same].view(torch.uint8))
    assert not scale[~same].isfinite().any()


@pytest.mark.parametrize("dtype", QUANTISED)
def test_values_beyond_the_largest_code_saturate(dtype):
    limit = LARGEST[dtype]
    assert largest(dtype) == limit
    codes = encode(torch.tensor([limit * 2, -limit * 2, limit, -limit, math.inf, -math.inf]), dtype)
    assert codes.double().tolist() == [limit, -limit, limit, -limit, limit, -limit]


def test_int8_is_symmetric_and_rounds_half_to_even():
    codes = encode(torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 126.6, -200.0]), torch.int8)
    assert codes.tolist() == [0, 2, 2, 0, -2, 127, -127]


def test_a_head_has_a_scale_of_its_own():
    rows = torch.ones(2, 3, 4) * torch.tensor([1.0, 10.0, 100.0]).view(1, 3, 1)
    _, scale = quantise(rows, torch.int8)
    torch.testing.assert_close(scale, torch.tensor([[1.0, 10.0, 100.0]] * 2) / 127)
