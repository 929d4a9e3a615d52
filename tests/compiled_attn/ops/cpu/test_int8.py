"""int8 caches under queries of bfloat16: what is hard for products of integers."""

from __future__ import annotations

import pytest
import torch

from tests.compiled_attn.ops.native_scene import Scene, assert_right, dense, scene

DECODES = [(1, 1), (1, 63), (1, 64), (1, 65), (2, 130), (1, 300)]


def _step(**options) -> Scene:
    options = {"heads": 8, "dim": 64, "size": 16, "poison": None, **options}
    return scene(DECODES, dtype=torch.bfloat16, cache_dtype=torch.int8, **options)


def _run(ops, step: Scene):
    return ops.paged_attention(*step.arguments, **step.options)


@pytest.mark.parametrize("dim", [16, 40, 64, 128, 200, 512, 576])
@pytest.mark.parametrize("heads", [2, 6, 8, 10])
def test_any_size_of_head_and_group(ops, dim, heads):
    step = _step(dim=dim, heads=heads, value_dim=48, poison=float("nan"))
    assert_right(_run(ops, step), step)


def test_every_code_counts_the_lowest_too(ops):
    step = _step()
    for cache in (step.key_cache, step.value_cache):
        codes = torch.arange(cache.numel()) % 256 - 128
        cache.copy_(codes.view(cache.shape).to(torch.int8))
    assert_right(_run(ops, step), step)
    step.key_cache.fill_(-128)
    step.query.fill_(2)
    assert_right(_run(ops, step), step)


def test_scales_may_be_negative_or_zero(ops):
    step = _step()
    for name in ("key_scale", "value_scale"):
        step.options[name] *= torch.randn_like(step.options[name])
        step.options[name][::3] = 0
    assert_right(_run(ops, step), step)


@pytest.mark.parametrize("size", [1e-30, 1e-10, 1e30])
def test_scales_of_values_of_any_size(ops, size):
    step = _step()
    step.options["value_scale"] *= size
    out, _ = _run(ops, step)
    want, _ = dense(step)
    torch.testing.assert_close(out.double() / size, want / size, rtol=2e-2, atol=2e-2)


def test_an_element_far_larger_than_the_others(ops):
    """It is as much as 100 others together, and half of the keys have nothing where it stands."""
    step = _step()
    step.query[..., 3] = 100
    step.key_cache[::2, ..., 3] = 0
    step.key_cache[1::2, ..., 3] = 1
    assert_right(_run(ops, step), step)


def test_a_token_that_takes_nearly_all_weight_and_has_no_value(ops):
    """A sink: what is left to others, 1e-3 in all, is as exact as ever."""
    step = _step()
    step.query.fill_(1)
    step.key_cache.fill_(0)
    for request in range(len(DECODES)):
        first = int(step.block_table[request, 0])
        step.key_cache[first, 0] = 127
        step.options["key_scale"][first, 0] = 11 / (127 * 64 * step.scale)
        step.value_cache[first, 0] = 0
        step.options["value_scale"][first, 0] = 1e-8
    step.options["value_scale"] *= 1000
    assert_right(_run(ops, step), step)


@pytest.mark.parametrize("where", ["query", "key_scale", "value_scale"])
def test_what_is_not_a_number_stays_so(ops, where):
    step = _step()
    request, head = 5, 0
    block = int(step.block_table[request, 1])
    if where == "query":
        step.query[-1, head, 7] = float("nan")
    else:
        step.options[where][block, 2, head] = float("nan")
    out, _ = _run(ops, step)
    assert out[-1, 0].isnan().all()
    assert out[:-1].isfinite().all()
