"""`reshape_and_cache`: every token in its slot, nothing else touched, padding skipped."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from compiled_attn.compat.paged import LAYOUTS, PagedArgumentError, reshape_and_cache
from tests.compiled_attn.compat.paged.scene import CODES, caches, put

BLOCKS, SIZE, HEADS, DIM = 5, 3, 2, 16
SLOTS = BLOCKS * SIZE


def _tokens(count: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    key, value = torch.randn(2, count, HEADS, DIM).to(dtype)
    return key, value


def _expected(layout: str, start: list[Tensor], slots: list[int], key: Tensor, value: Tensor):
    expected = [cache.clone() for cache in start]
    for token, slot in enumerate(slots):
        if slot >= 0:
            at = (slot // SIZE, slot % SIZE) if layout != "flat" else (0, slot)
            put(*expected, layout, *at, key[token], value[token])
    return expected


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


@given(
    layout=st.sampled_from(LAYOUTS),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    index_dtype=st.sampled_from([torch.int32, torch.int64]),
    slots=st.lists(st.integers(0, SLOTS - 1), max_size=SLOTS, unique=True),
    skipped=st.sets(st.integers(0, SLOTS - 1)),
    padding=st.integers(0, 3),
)
def test_tokens_are_in_their_slots_and_nothing_else_changed(
    layout, dtype, index_dtype, slots, skipped, padding
) -> None:
    slots = [-1 - slot if slot in skipped else slot for slot in slots]
    start = [cache.fill_(math.nan) for cache in caches(layout, BLOCKS, SIZE, HEADS, DIM, dtype)]
    key, value = _tokens(len(slots) + padding, dtype)
    expected = _expected(layout, start, slots, key, value)
    mapping = torch.tensor(slots, dtype=index_dtype)
    assert reshape_and_cache(key, value, *start, mapping, "auto", 1.0, 1.0, layout=layout) is None
    for cache, right in zip(start, expected, strict=True):
        assert torch.equal(_bits(cache), _bits(right))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("slots", "written"),
    [
        *((s, s) for s in ([-1, 0, -1], [-1, SLOTS - 1], [-1, -7], [-1] * 4 + [2])),
        ([7, 4, 0, 0], [7, 4, 0, -1]),  # as `AttentionMetadata` pads it
    ],
)
def test_padding_is_not_written(layout: str, slots: list[int], written: list[int]) -> None:
    start = list(caches(layout, BLOCKS, SIZE, HEADS, DIM, torch.float32))
    key, value = _tokens(len(slots))
    padding = [slot < 0 or slots.count(slot) > 1 for slot in slots]
    key[padding], value[padding] = math.nan, math.nan
    expected = _expected(layout, start, written, key, value)
    reshape_and_cache(key, value, *start, torch.tensor(slots), "auto", 1.0, 1.0, layout=layout)
    for cache, right in zip(start, expected, strict=True):
        assert torch.equal(_bits(cache), _bits(right))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e4m3", "fp8_e5m2", "int8"])
@pytest.mark.parametrize("per_head", [False, True])
def test_quantised_tokens_are_scaled_rounded_and_saturated(layout, kv_cache_dtype, per_head):
    stored = CODES.get(kv_cache_dtype, torch.int8)
    scales = (torch.tensor([0.5, 2.0]), torch.tensor([1.0, 0.25])) if per_head else (0.5, 2.0)
    key, value = _tokens(3)
    key[0, 0, 0], value[1, 1, 1], value[2, 0, 0] = 1e6, -1e6, math.inf
    limit = torch.finfo(stored).max if stored.is_floating_point else 127

    def encode(tokens: Tensor, scale: Any) -> Tensor:
        scaled = tokens / (scale.view(-1, 1) if per_head else scale)
        scaled = scaled if stored.is_floating_point else scaled.round()
        return scaled.clamp(-limit, limit).to(stored)

    start = list(caches(layout, BLOCKS, SIZE, HEADS, DIM, stored))
    right = _expected(layout, start, [7, 14, 0], encode(key, scales[0]), encode(value, scales[1]))
    mapping = torch.tensor([7, 14, 0])
    reshape_and_cache(key, value, *start, mapping, kv_cache_dtype, *scales, layout=layout)
    for cache, expected in zip(start, right, strict=True):
        assert torch.equal(_bits(cache), _bits(expected))
    assert start[1].float().isfinite().all()
    assert start[0].float().max() == limit


def test_fp8_caches_may_be_declared_as_bytes() -> None:
    typed = caches("packed", BLOCKS, SIZE, HEADS, DIM, torch.float8_e4m3fn)
    raw = [torch.zeros_like(cache, dtype=torch.uint8) for cache in typed]
    key, value = _tokens(2, torch.bfloat16)
    for both in (typed, raw):
        reshape_and_cache(key, value, *both, torch.tensor([4, 9]), "fp8", 0.5, 0.5)
    for cache, expected in zip(raw, typed, strict=True):
        assert torch.equal(cache, _bits(expected))
        assert cache.any()


def test_caches_that_are_views_are_written_through() -> None:
    fused = torch.zeros(BLOCKS, 2, SIZE, HEADS, DIM)
    key, value = _tokens(1)
    reshape_and_cache(
        key, value, fused[:, 0], fused[:, 1], torch.tensor([4]), "auto", 1.0, 1.0, layout="NHD"
    )
    assert torch.equal(fused[1, 0, 1], key[0])
    assert torch.equal(fused[1, 1, 1], value[0])
    assert fused.count_nonzero() == 2 * HEADS * DIM


def test_the_positional_order_is_the_known_one() -> None:
    parameters = inspect.signature(reshape_and_cache).parameters.values()
    names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    expected = "key value key_cache value_cache slot_mapping kv_cache_dtype k_scale v_scale"
    assert names == expected.split()


def test_keys_that_require_grad_leave_no_history() -> None:
    both = caches("packed", BLOCKS, SIZE, HEADS, DIM, torch.float32)
    key, value = _tokens(1)
    reshape_and_cache(key.requires_grad_(), value, *both, torch.tensor([4]), "auto", 1.0, 1.0)
    assert not both[0].requires_grad
    assert both[0].any()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"slot_mapping": torch.tensor([0, 15])}, PagedArgumentError, "slots below 15, .* got 15"),
        ({"slot_mapping": torch.tensor([4, 4])}, PagedArgumentError, "got slot 4 twice"),
        ({"slot_mapping": torch.tensor([1, 2, 3])}, PagedArgumentError, "no longer than key"),
        ({"slot_mapping": torch.tensor([1.0, 2.0])}, PagedArgumentError, "slot_mapping of dtype"),
        ({"slot_mapping": torch.tensor([[1, 2]])}, PagedArgumentError, r"slot_mapping \(T,\)"),
        ({"slot_mapping": [1, 2]}, TypeError, "slot_mapping: expected a tensor"),
        ({"key": torch.zeros(2, 2, 8)}, PagedArgumentError, "value like key"),
        ({"key": torch.zeros(2, 32)}, PagedArgumentError, r"key \(T, Hk, D\)"),
        ({"key": torch.zeros(2, 2, 16).half()}, PagedArgumentError, "value of dtype float16, got"),
        ({"value": torch.zeros(2, 2, 16, device="meta")}, PagedArgumentError, "value on cpu, got"),
        ({"key_cache": torch.zeros(5, 2, 4, 4, 4)}, PagedArgumentError, "key_cache in layout"),
        ({"value_cache": torch.zeros(5, 2, 16)}, PagedArgumentError, "value_cache in layout"),
        ({"kv_cache_dtype": "fp8"}, PagedArgumentError, "key_cache"),
        ({"kv_cache_dtype": "float"}, PagedArgumentError, "kv_cache_dtype of"),
        ({"layout": "NHD"}, PagedArgumentError, "cache in layout NHD"),
        ({"layout": "nhd"}, PagedArgumentError, "a layout of"),
        (
            {"value_cache": torch.zeros(1, 2, 16, 3).expand(5, -1, -1, -1)},
            PagedArgumentError,
            "caches without expanded axes",
        ),
    ],
)
def test_what_does_not_fit_is_refused_and_the_caches_are_as_they_were(change, error, message):
    key, value = _tokens(2)
    key_cache, value_cache = caches("packed", BLOCKS, SIZE, HEADS, DIM, torch.float32)
    arguments = {
        "key": key, "value": value, "key_cache": key_cache, "value_cache": value_cache,
        "slot_mapping": torch.tensor([0, 1]), "kv_cache_dtype": "auto", "k_scale": 1.0,
        "v_scale": 1.0,
    }  # fmt: skip
    with pytest.raises(error, match=message):
        reshape_and_cache(**(arguments | change))
    assert not key_cache.any()
    assert not value_cache.any()


@pytest.mark.parametrize(("which", "name"), [(0, "key"), (1, "value")])
def test_tokens_in_the_memory_of_a_cache_are_refused(which: int, name: str) -> None:
    pair = caches("NHD", BLOCKS, SIZE, HEADS, DIM, torch.float32)
    for cache in pair:
        cache.copy_(torch.randn(cache.shape))
    start = [cache.clone() for cache in pair]
    tokens = [*_tokens(2)]
    tokens[which] = pair[0].flatten(0, 1)[3:5]
    with pytest.raises(PagedArgumentError, match=f"{name} apart from key_cache"):
        reshape_and_cache(*tokens, *pair, torch.tensor([4, 9]), "auto", 1.0, 1.0, layout="NHD")
    assert all(map(torch.equal, pair, start))
