"""Layouts of a paged cache: shapes, and conversions that are exact in every direction."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from compiled_attn.compat.paged import (
    LAYOUTS,
    PagedArgumentError,
    convert_key,
    convert_value,
    empty_caches,
    key_shape,
    packing,
    value_shape,
)
from tests.compiled_attn.compat.paged.scene import caches, put

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn,
]  # fmt: skip


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def _filled(
    layout: str, sizes: tuple[int, int, int, int], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Caches written token by token, a different number in every cell as far as the dtype goes."""
    blocks, size, heads, dim = sizes
    key, value = caches(layout, *sizes, dtype)
    for block, slot in itertools.product(range(blocks), range(size)):
        token = (block * size + slot) * heads * dim + torch.arange(heads * dim).view(heads, dim)
        at = slot if layout != "flat" else block * size + slot
        put(key, value, layout, block, at, (token % 127).to(dtype), (token * 7 % 101).to(dtype))
    return key, value


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("source", LAYOUTS)
@pytest.mark.parametrize("target", LAYOUTS)
def test_every_conversion_moves_every_element_to_its_place(source, target, dtype):
    sizes = (3, 5, 2, 32)
    key, value = _filled(source, sizes, dtype)
    expected_key, expected_value = _filled(target, sizes, dtype)
    got_key = convert_key(key, source, target, block_size=5)  # type: ignore[arg-type]
    got_value = convert_value(value, source, target, block_size=5)  # type: ignore[arg-type]
    assert got_key.shape == expected_key.shape
    assert got_value.shape == expected_value.shape
    assert torch.equal(_bits(got_key), _bits(expected_key))
    assert torch.equal(_bits(got_value), _bits(expected_value))


@given(
    route=st.lists(st.sampled_from(LAYOUTS), min_size=1, max_size=6),
    blocks=st.integers(1, 4),
    size=st.sampled_from([1, 2, 7, 16]),
    heads=st.integers(1, 3),
    rows=st.integers(1, 3),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.float8_e5m2]),
)
def test_any_way_through_the_layouts_and_back_keeps_every_bit(
    route: list, blocks: int, size: int, heads: int, rows: int, dtype: torch.dtype
) -> None:
    sizes = (blocks, size, heads, rows * packing(dtype))
    nan_bits = torch.randint(0, 256, (*sizes[:3], sizes[3] * dtype.itemsize), dtype=torch.uint8)
    start = nan_bits.view(dtype)  # NaNs with payloads included
    for convert in (convert_key, convert_value):
        now, layout = start, "NHD"
        for target in [*route, "NHD"]:
            now = convert(now, layout, target, block_size=size)  # type: ignore[arg-type]
            layout = target
        assert torch.equal(_bits(now), nan_bits)


@pytest.mark.parametrize(
    ("source", "target", "key_is_view", "value_is_view"),
    [
        ("flat", "NHD", True, True),
        ("NHD", "flat", True, True),
        ("NHD", "HND", True, True),
        ("HND", "NHD", True, True),
        ("NHD", "packed", True, True),
        ("HND", "packed", True, True),
        ("flat", "packed", True, True),
        ("packed", "NHD", False, True),
        ("packed", "HND", False, True),
        ("packed", "flat", False, False),
        ("HND", "flat", False, False),
    ],
)
def test_a_conversion_is_a_view_where_strides_can_say_it(
    source: str, target: str, key_is_view: bool, value_is_view: bool
) -> None:
    key, value = empty_caches(3, 4, 2, 8, layout=source)  # type: ignore[arg-type]
    new_key = convert_key(key, source, target, block_size=4)  # type: ignore[arg-type]
    new_value = convert_value(value, source, target, block_size=4)  # type: ignore[arg-type]
    assert (new_key.data_ptr() == key.data_ptr()) == key_is_view
    assert (new_value.data_ptr() == value.data_ptr()) == value_is_view


@pytest.mark.parametrize(
    ("dtype", "x"), [(torch.float32, 4), (torch.float16, 8), (torch.int8, 16)], ids=str
)
def test_x_is_sixteen_bytes_of_elements(dtype: torch.dtype, x: int) -> None:
    assert packing(dtype) == x
    assert key_shape("packed", 195, 16, 56, 128, dtype) == (195, 56, 128 // x, 16, x)
    assert value_shape("packed", 195, 16, 56, 128) == (195, 56, 128, 16)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_new_caches_have_the_shapes_of_their_layout(layout: str) -> None:
    key, value = empty_caches(6, 3, 2, 16, layout=layout, dtype=torch.bfloat16)  # type: ignore[arg-type]
    expected_key, expected_value = caches(layout, 6, 3, 2, 16, torch.bfloat16)
    assert (key.shape, key.dtype) == (expected_key.shape, torch.bfloat16)
    assert (value.shape, value.dtype) == (expected_value.shape, torch.bfloat16)


def test_a_head_dim_that_x_does_not_divide_has_no_packed_form() -> None:
    with pytest.raises(PagedArgumentError, match=r"divisible by x = 8 .* got 20: use layout NHD"):
        empty_caches(2, 4, 1, 20, dtype=torch.float16)
    nhd, _ = empty_caches(2, 4, 1, 20, layout="NHD", dtype=torch.float16)
    with pytest.raises(PagedArgumentError, match="divisible by x = 8"):
        convert_key(nhd, "NHD", "packed")
    assert convert_value(nhd, "NHD", "packed").shape == (2, 1, 20, 4)


@pytest.mark.parametrize(
    ("shape", "source", "options", "message"),
    [
        ((8, 2, 8), "flat", {}, "block_size of a flat cache, got None"),
        ((8, 2, 8), "flat", {"block_size": 3}, "multiple of block_size 3, got 8"),
        ((2, 4, 2, 8), "packed", {}, "packed cache with 5 axes"),
        ((2, 2, 2, 4, 8), "packed", {}, "last axis of x = 4"),
        ((8, 2, 8), "NHD", {}, "NHD cache with 4 axes"),
        ((2, 4, 2, 8), "NDH", {}, "a layout of"),
    ],
)
def test_a_cache_that_is_not_of_its_layout_is_refused(shape, source, options, message):
    with pytest.raises(PagedArgumentError, match=message):
        convert_key(torch.zeros(shape), source, "HND", **options)  # type: ignore[arg-type]
    with pytest.raises(PagedArgumentError, match="a layout of"):
        convert_value(torch.zeros(2, 4, 2, 8), "NHD", "nhd")  # type: ignore[arg-type]


def test_a_cache_without_blocks_is_refused() -> None:
    with pytest.raises(PagedArgumentError, match=r"at least 1, got \(0, 4, 2, 8\)"):
        empty_caches(0, 4, 2, 8)
