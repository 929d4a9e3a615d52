"""What the kernel does at its edges: rounding, sizes of zero, shared memory, modes of threads."""

import math
import threading

import numpy as np
import pytest
import torch

from compiled_attn.ops import NativeOps
from tests.compiled_attn.ops.kernels import BEST, FAKE_DEVICE, ON_DEVICES, loaded, threads
from tests.compiled_attn.ops.native_scene import assert_right, scene
from tests.slow import slow_but

T, H, HK, D = 9, 4, 2, 64


@pytest.fixture(params=[BEST, FAKE_DEVICE, *ON_DEVICES], scope="module")
def ops(request) -> NativeOps:
    return loaded(request.param)


def step(dtype=torch.float32):
    """A prompt of T tokens in block 1, to be written and attended."""
    query, key, value = (torch.randn(T, heads, D).to(dtype) for heads in (H, HK, HK))
    caches = [torch.zeros(4, 16, HK, D, dtype=dtype) for _ in range(2)]
    slots = torch.arange(16, 16 + T)
    ints = ([[1]], [T], [0, T])
    return [query, key, value, *caches, slots, *(torch.tensor(i, dtype=torch.int32) for i in ints)]


@pytest.mark.parametrize("which", ["heads", "dim"])
def test_sizes_of_zero_are_refused(ops, which):
    query, _, _, key_cache, value_cache, _, *ints = step()
    if which == "heads":
        query = query[:, :0]
    else:
        query, key_cache = query[..., :0], key_cache[..., :0]
    with pytest.raises(RuntimeError, match="expected"):
        ops.paged_attention(query, key_cache, value_cache, *ints, 0.1)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_reading_from_the_cache_that_is_written_is_refused(ops, which):
    arguments = step()
    arguments[which] = arguments[3].flatten(0, 1)[:T]
    with pytest.raises(RuntimeError, match=r"apart from key_cache, got shared memory"):
        ops.paged_attention_(*arguments, 0.1)
    assert not arguments[3].any()


def test_an_expanded_cache_is_not_written(ops):
    arguments = step()
    arguments[4] = torch.zeros(1, 16, HK, D).expand(4, 16, HK, D)
    with pytest.raises(RuntimeError, match=r"value_cache with memory for each element"):
        ops.paged_attention_(*arguments, 0.1)


def test_codes_are_subnormal_whatever_the_thread_makes_of_subnormals(ops):
    query = torch.zeros(1, 1, 16)
    keys = torch.zeros(2, 16, 1, 16, dtype=torch.float8_e4m3fn)
    values = torch.full((2, 16, 1, 16), 3, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scale = torch.ones(2, 16, 1)
    ints = [torch.tensor(i, dtype=torch.int32) for i in ([[1]], [5], [0, 1])]
    scales = {"key_scale": scale, "value_scale": scale}
    want, _ = ops.paged_attention(query, keys, values, *ints, 1.0, **scales)
    assert want[0, 0, 0] == 3 * 2.0**-9
    try:
        torch.set_flush_denormal(True)
        got, _ = ops.paged_attention(query, keys, values, *ints, 1.0, **scales)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(got, want)


@pytest.mark.parametrize("rows", [3, 300])
def test_a_row_that_sees_nothing_is_zero_beside_infinite_values(ops, rows):
    key_cache, value_cache = torch.randn(2, 16, 1, 16), torch.randn(2, 16, 1, 16)
    value_cache[1, 1] = torch.inf
    ints = [torch.tensor(i, dtype=torch.int32) for i in ([[1]], [2], [0, rows])]
    out, lse = ops.paged_attention(torch.randn(rows, 1, 16), key_cache, value_cache, *ints, 1.0)
    assert not out[: rows - 2].any() and lse[: rows - 2].isneginf().all()


def test_the_number_of_threads_is_torchs_in_every_thread(ops):
    arguments = step()
    results = []
    for count in (1, 2):
        with threads(count):
            call = threading.Thread(
                target=lambda: results.append(ops.paged_attention_(*arguments, 0.1)[0])
            )
            call.start()
            call.join()
    assert torch.equal(*results)


@pytest.mark.parametrize("sink", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_of_no_request_are_zero_whatever_the_sinks_are(ops, sink, dtype):
    sinks = torch.tensor([0.0, sink])
    query = torch.randn(6, 2, 32).to(dtype)
    cache = torch.randn(3, 4, 1, 32).to(dtype)
    ints = [torch.tensor(i, dtype=torch.int32) for i in ([[1]], [2], [2, 4])]
    out, lse = ops.paged_attention(query, cache, cache, *ints, 0.1, sinks=sinks)
    for token in (0, 1, 4, 5):
        assert not out[token].any()
        assert torch.equal(lse[token].nan_to_num(7.0), sinks.nan_to_num(7.0))


@pytest.mark.parametrize("window", slow_but((20,), (20, None)))
def test_a_band_of_many_tiles_is_that_of_dense_attention(ops, window):
    # 96 rows of 32 heads on each of 16 KV heads are 2 bands of 8 tiles; the first rows see nothing.
    sinks = torch.linspace(-2, 2, 512)
    step = scene([(96, 90)], heads=512, kv_heads=16, dim=16, window=window, sinks=sinks)
    assert_right(ops.paged_attention(*step.arguments, **step.options), step)


def _with(ops: NativeOps, query, keys, values, scale: float = D**-0.5):
    """The last rows of a request that has four blocks."""
    table = torch.arange(4, dtype=torch.int32)[None]
    length, starts = torch.tensor([64], dtype=torch.int32), torch.tensor([0, len(query)])
    return ops.paged_attention(query, keys, values, table, length, starts.int(), scale)


@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("size", [1e3, 1e5, 1e6, 1e9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_great_scores_weigh_what_they_are(ops, dtype, size, rows):
    query, keys = (torch.randn(s) * size for s in ((rows, H, D), (4, 16, 1, D)))
    query, keys, values = (x.to(dtype) for x in (query, keys, torch.randn(4, 16, 1, D)))
    out, lse = _with(ops, query, keys, values)
    scores, keys = query.double() @ keys.double().view(64, D).T * D**-0.5, keys.double().view(64, D)
    seen = torch.arange(64) <= torch.arange(64 - rows, 64)[:, None, None]
    scores = scores.masked_fill(~seen, -1e300)
    errors = _gamma(D + 6) * (query.double().abs() @ keys.abs().T) * D**-0.5 * seen
    weights, values = scores.softmax(-1), values.double().view(64, D)
    # Of the exponential, of sums over 64 keys, and of storing the weight and the output.
    stored = 1 + torch.finfo(dtype).eps / 2
    relative = (1 + _EXPONENTIAL) * (1 + _gamma(64 + 6)) * stored**2 - 1
    off = _weight_errors(scores, errors, weights)
    bound = (off + relative * (weights + off)) @ values.abs()
    assert ((out.double() - weights @ values).abs() <= bound).all()
    assert bound.median() < 0.1  # a key that nearly ties with the largest is rare
    expected = scores.logsumexp(-1)
    bound = errors.amax(-1) + relative + _gamma(4) * expected.abs()
    assert ((lse.double() - expected).abs() <= bound).all()


def _gamma(roundings: int) -> float:
    """Relative error after so many roundings to float32, in any order (Higham 2002, 3.1)."""
    total = roundings * torch.finfo(torch.float32).eps / 2
    return total / (1 - total)


_EXPONENTIAL = 3e-6 + _gamma(100)
"""Relative error of a weight: that of the kernels' polynomial (`vmath.h`), and of its
argument, which is above -100 where the weight is not nothing."""


def _weight_errors(scores, errors, weights):
    """How far weights are off at most when each score is off by up to its error: ``[..., keys]``.

    A weight is largest when its own score is too high and all others are too low.
    """
    others, own = scores.unsqueeze(-2), scores.unsqueeze(-1)
    spread = (errors.unsqueeze(-2) + errors.unsqueeze(-1)) * (1 - torch.eye(scores.shape[-1]))
    most = 1 / (others - own - spread).exp().sum(-1)
    least = 1 / (others - own + spread).exp().sum(-1)
    return torch.maximum(most - weights, weights - least)


@pytest.mark.parametrize("size", [1e7, math.inf])
def test_a_row_of_great_scores_changes_no_bit_of_its_neighbours(ops, size):
    query, keys, values = (torch.randn(s) for s in ((64, H, D), (4, 16, 1, D), (4, 16, 1, D)))
    before, _ = _with(ops, query, keys, values)
    query[20] *= size
    after, _ = _with(ops, query, keys, values)
    others = torch.arange(64) != 20
    assert torch.equal(after[others], before[others])


def test_a_scale_that_is_nearly_zero_weighs_all_keys_alike(ops):
    query, keys, values = (torch.randn(s) for s in ((64, H, D), (4, 16, 1, D), (4, 16, 1, D)))
    out, _ = _with(ops, query, keys, values, 1e-46)
    expected = values.view(64, D).cumsum(0) / torch.arange(1, 65)[:, None]
    torch.testing.assert_close(out, expected[:, None].expand_as(out), rtol=1e-5, atol=1e-5)


def test_what_is_empty_has_any_strides():
    """Such as those that numpy gives it, which `contiguous` does not change."""
    empty = torch.from_numpy(np.zeros((0, 4), np.int32))
    assert empty.stride() == (0, 0)
    cache = torch.zeros(3, 2, 1, 8)
    lengths, starts = torch.zeros(0, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    for query in (torch.zeros(0, 2, 8), torch.zeros(0, 2, 16)[..., ::2]):
        call = query, cache, cache, empty, lengths, starts, 1.0
        assert loaded(BEST).paged_attention(*call)[0].shape == (0, 2, 8)
