"""Flash, paged and unified attention and block moves on a device that is not the CPU.

The oracles are those of their own tests.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

from compiled_attn import PagedKVCache, unified_attention
from compiled_attn.cache.defrag import BlockSwap
from compiled_attn.compat.flash import flash_attn_with_kvcache
from compiled_attn.compat.paged import paged_attention_v1
from tests.compiled_attn.cache.defrag.swapping import contents, equal, exchanged, moved, noise
from tests.compiled_attn.compat.flash.cases import check
from tests.compiled_attn.compat.flash.test_api import upstream
from tests.compiled_attn.compat.paged.test_attention import steps
from tests.compiled_attn.poison import arguments_of, both_metadata
from tests.fake_device import NAME, counts, open_device
from tests.fake_device.moved import on_device
from tests.oracle import Scene, Shape

ON_DEVICES = pytest.mark.parametrize("device", [NAME, pytest.param("cuda", marks=pytest.mark.gpu)])


@ON_DEVICES
@pytest.mark.parametrize("seed", range(12))
def test_flash_attention(seed, device):
    check(upstream(seed).make(), on_device(flash_attn_with_kvcache, device))


@ON_DEVICES
@given(step=steps())
def test_paged_attention(device, step):
    step = step.make()
    out, args = torch.zeros_like(step.query), step.args()
    here = paged_attention_v1(out.clone(), *args, layout=step.layout)
    there = on_device(paged_attention_v1, device)(out.clone(), *args, layout=step.layout)
    atol = 1e-5 if out.dtype == torch.float32 else 1e-2
    torch.testing.assert_close(there, here, atol=atol, rtol=atol)


@ON_DEVICES
@pytest.mark.parametrize("cache_dtype", [None, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("kernel", ["native", "portable"])
@pytest.mark.parametrize("seed", range(3))
def test_unified_attention_waits_for_nothing(seed, kernel, cache_dtype, device):
    scene = Scene(seed, Shape(cache_dtype=cache_dtype)).random()
    metadata = both_metadata(scene)
    arguments = arguments_of(scene, metadata) | {"scale": 0.25, "metadata": metadata}
    attend = on_device(unified_attention, device, waits=False)
    out = attend(**arguments, kernel=kernel, softcap=5.0, sliding_window=7)
    real = sum(len(request.tokens) for request in scene.requests)
    expected, _ = scene.expected(softcap=5.0, sliding_window=7)
    torch.testing.assert_close(out[:real].double(), expected, atol=2e-5, rtol=2e-5)
    assert not out[real:].any()


@ON_DEVICES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_blocks_are_exchanged_and_moved(dtype, device):
    if device == NAME:
        open_device()
    cache = PagedKVCache(2, 24, 4, 2, 16, dtype=dtype)
    noise(list(cache.buffers()))
    before = contents(list(cache.buffers()))
    cache = cache.to(device)
    swap = BlockSwap(cache, pad_sizes=(4, 16))
    swap.warmup()
    pairs = [(1, 2), (3, 9), (7, 20), (11, 5), (13, 4)]
    spent = counts() if device == NAME else None
    swap.swap(pairs)
    assert spent is None or counts().since(spent)[:3] == (1, 0, 0)
    assert equal(_there(cache), exchanged(before, pairs))
    swap.swap(pairs)
    swap.move(pairs)
    assert equal(_there(cache), moved(before, pairs))


def _there(cache):
    return contents([buffer.cpu() for buffer in cache.buffers()])
