"""The paged cache: sizes, views, scales, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from compiled_attn import PagedKVCache
from compiled_attn.cache.kv_cache import KVShape
from compiled_attn.cache.quantisation import QUANTISED


def test_block_views_share_the_flat_storage():
    cache = PagedKVCache(2, 5, 4, 3, 8)
    cache.key(1)[2 * 4 + 3] = 7.0
    assert cache.key_blocks(1)[2, 3].eq(7).all() and not cache.key(0).any()
    assert cache.key_blocks(1).shape == (5, 4, 3, 8)
    assert cache.value(1).shape == (20, 3, 8)


def test_keys_values_and_layers_have_storage_of_their_own():
    cache = PagedKVCache(2, 3, 4, 1, 8, dtype=torch.int8)
    tensors = [get(layer) for layer in range(2) for get in (cache.key, cache.value)]
    tensors += [get(layer) for layer in range(2) for get in (cache.key_scale, cache.value_scale)]
    assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors) == 8


def test_a_cache_without_values_shares_the_key():
    cache = PagedKVCache(1, 3, 4, 1, 8, has_value=False)
    assert cache.value(0) is cache.key(0)
    assert cache.bytes_per_block == 4 * 8 * 4
    assert len(list(cache.buffers())) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, *QUANTISED])
@pytest.mark.parametrize("has_value", [True, False])
def test_bytes_per_block_are_the_bytes_of_the_buffers(dtype, has_value):
    cache = PagedKVCache(3, 5, 7, 2, 24, dtype=dtype, has_value=has_value)
    assert cache.bytes_per_block * 5 == sum(buffer.nbytes for buffer in cache.buffers())


@pytest.mark.parametrize("dtype", QUANTISED)
def test_a_quantised_cache_has_a_float32_scale_for_each_slot_and_head(dtype):
    cache = PagedKVCache(2, 5, 4, 3, 8, dtype=dtype)
    assert cache.is_quantised and cache.dtype == dtype
    for scale in (cache.key_scale(1), cache.value_scale(1)):
        assert scale.shape == (20, 3) and scale.dtype == torch.float32
    # A slot that was never written reads as zeros.
    assert not cache.key(1).float().any() and not cache.key_scale(1).any()


def test_only_what_a_quantised_cache_stores_has_scales():
    keys = PagedKVCache(1, 5, 4, 1, 8, dtype=torch.int8, has_value=False)
    assert keys.key_scale(0) is not None and keys.value_scale(0) is None
    floats = PagedKVCache(1, 5, 4, 1, 8)
    assert not floats.is_quantised and floats.key_scale(0) is floats.value_scale(0) is None


@pytest.mark.parametrize("dtype", [torch.float32, *QUANTISED])
def test_buffers_stay_out_of_checkpoints(dtype):
    assert PagedKVCache(1, 3, 4, 1, 8, dtype=dtype).state_dict() == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.float8_e4m3fn])
def test_buffers_move_with_the_module(dtype):
    cache = PagedKVCache(1, 3, 4, 1, 8, dtype=dtype).to("meta")
    assert all(buffer.is_meta for buffer in cache.buffers())
    assert cache.dtype == dtype
    assert PagedKVCache(1, 3, 4, 1, 8).to(torch.float16).dtype == torch.float16


def test_a_layer_that_does_not_exist_is_an_error():
    with pytest.raises(AttributeError, match="key_2"):
        PagedKVCache(2, 3, 4, 1, 8).key(2)


def test_its_repr_says_what_it_holds():
    text = repr(PagedKVCache(2, 5, 4, 3, 8, dtype=torch.int8))
    for part in ("layers=2", "blocks=5", "block_size=4", "kv_heads=3", "head_dim=8", "int8"):
        assert part in text


@pytest.mark.parametrize(
    ("sizes", "name", "least"),
    [
        ((0, 2, 1, 1, 1), "num_layers", 1),
        ((1, 1, 1, 1, 1), "num_blocks", 2),
        ((1, 2, 0, 1, 1), "block_size", 1),
        ((1, 2, 1, 0, 1), "num_kv_heads", 1),
        ((1, 2, 1, 1, -3), "head_dim", 1),
    ],
)
def test_sizes_that_cannot_work_are_refused(sizes, name, least):
    with pytest.raises(ValueError, match=f"expected {name}.* >= {least}, got"):
        PagedKVCache(*sizes)


_SHAPES = [KVShape(2, 8, 4), KVShape(1, 6, None), KVShape(2, 8, 4, same_as=0)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_layers_of_several_shapes_have_buffers_of_theirs_or_of_an_earlier_layer(dtype):
    cache = PagedKVCache(3, 5, 4, 2, 8, dtype=dtype, shapes=_SHAPES)
    assert cache.key(0).shape == (20, 2, 8) and cache.value(0).shape == (20, 2, 4)
    assert cache.value(1) is cache.key(1) and cache.key(1).shape == (20, 1, 6)
    assert cache.key(2) is cache.key(0) and cache.value(2) is cache.value(0)
    assert [cache.stores_value(layer) for layer in range(3)] == [True, False, True]
    assert cache.bytes_per_block == sum(buffer[:4].nbytes for buffer in cache.buffers())
    assert cache.value_blocks(2).shape == (5, 4, 2, 4)
    assert (cache.value_scale(1) is None) and ((cache.key_scale(1) is None) != cache.is_quantised)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (_SHAPES[:2], "one for each of 3 layers, got 2"),
        ([*_SHAPES[:2], KVShape(2, 0, 4)], "sizes of at least 1"),
        ([*_SHAPES[:2], KVShape(2, 8, 0)], "sizes of at least 1"),
        ([*_SHAPES[:2], KVShape(2, 8, 4, same_as=2)], "an earlier layer"),
        ([*_SHAPES[:2], KVShape(2, 8, 4, same_as=1)], "an earlier layer of its shape"),
        ([KVShape(2, 8, 4), *[KVShape(2, 8, 4, same_as=n) for n in (0, 1)]], "buffers of its own"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(shapes, message):
    with pytest.raises(ValueError, match=message):
        PagedKVCache(3, 5, 4, 2, 8, shapes=shapes)
