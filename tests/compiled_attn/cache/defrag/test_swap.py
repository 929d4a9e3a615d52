"""Exchanges and moves of blocks, byte for byte, against numpy; captured, padded, split, undone."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compiled_attn import PagedKVCache
from compiled_attn.cache.defrag import PAD_SIZES, BlockSwap
from compiled_attn.compat.paged.layouts import LAYOUTS, convert_key, convert_value, empty_caches
from graphs import no_compile
from tests.compiled_attn.cache.defrag.swapping import (
    BLOCKS,
    assert_copies,
    contents,
    equal,
    exchanged,
    moved,
    noise,
    random_pairs,
    ready,
    small_cache,
)
from tests.slow import slow_but

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int8,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


@pytest.mark.parametrize("has_value", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_cache_of_the_library_is_exchanged_with_its_scales(dtype, has_value):
    cache = small_cache(dtype, has_value=has_value)
    swap = ready(cache)
    assert len(list(cache.buffers())) == 2 * (1 + has_value) * (1 + cache.is_quantised)
    assert swap.bytes_per_block == cache.bytes_per_block
    assert_copies(swap, list(cache.buffers()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_of_paged_attention_is_exchanged(layout, dtype):
    caches = empty_caches(BLOCKS, 4, 2, 16, layout=layout, dtype=dtype)
    noise(caches)
    assert_copies(ready(caches, BLOCKS), caches)


@pytest.mark.parametrize("target", ["NHD", "HND", "packed"])
def test_a_view_in_another_layout_is_exchanged(target):
    key, value = empty_caches(BLOCKS, 4, 2, 16, layout="NHD")
    noise([key, value])
    views = convert_key(key, "NHD", target), convert_value(value, "NHD", target)
    assert views[0]._is_view() or target == "NHD"
    assert_copies(ready(views), [key, value])


def test_halves_of_one_tensor_are_exchanged():
    both = torch.zeros(2, BLOCKS, 4, 2, 8)
    noise([both])
    assert_copies(ready([both[0], both[1]]), [both[0], both[1]])
    interleaved = torch.zeros(BLOCKS, 2, 4, 2, 8)
    noise([interleaved])
    assert_copies(ready([interleaved[:, 0], interleaved[:, 1]]), [interleaved])


@pytest.mark.parametrize(
    ("shape", "dtype", "word"),
    [
        ((BLOCKS, 1, 3), torch.int8, torch.uint8),
        ((BLOCKS, 1, 3), torch.bfloat16, torch.int16),
        ((BLOCKS, 3), torch.float32, torch.int32),
        ((BLOCKS, 2, 3), torch.float32, torch.int64),
        ((BLOCKS,), torch.float64, torch.int64),
    ],
)
def test_rows_are_words_as_wide_as_a_block_allows(shape, dtype, word):
    tensor = torch.zeros(shape, dtype=dtype)
    noise([tensor])
    swap = ready([tensor])
    assert swap.get_buffer("rows_0").dtype == word
    assert_copies(swap, [tensor])


def test_a_cache_that_begins_inside_of_its_memory_is_exchanged():
    memory = torch.zeros(1 + BLOCKS * 6, dtype=torch.int16)
    cache = memory[1:].view(BLOCKS, 6)
    noise([cache])
    before = memory[0].clone()
    assert_copies(ready([cache]), [cache])
    assert memory[0] == before


# What inductor makes of it is in graph_breaks/test_swap.
@pytest.mark.parametrize("backend", slow_but(("aot_eager",), ("aot_eager", "inductor")))
def test_compiled_graphs_copy_as_eager_ones_and_compile_nothing_later(backend, runs):
    cache = PagedKVCache(1, BLOCKS, 4, 2, 16, dtype=torch.float8_e4m3fn)
    noise(list(cache.buffers()))
    swap = ready(cache, backend=backend, pad_sizes=(4,))
    runs.clear()
    with no_compile():
        assert_copies(swap, list(cache.buffers()))
    # 1, 4, 7, 0 and 11 pairs
    assert runs == ["swaps[swaps=4]"] * 7 + ["moves[moves=4]"] * 7


EDGES = {1: [8], 8: [8], 9: [16], 512: [512], 513: [512, 8], 1030: [512, 512, 8]}


@pytest.mark.parametrize(("count", "pads"), EDGES.items())
@pytest.mark.parametrize("name", ["swap", "move"])
def test_a_public_call_replays_the_graphs_that_hold_its_pairs(name, count, pads, runs):
    cache = torch.zeros(2100, 2, dtype=torch.int32)
    noise([cache])
    swap = BlockSwap([cache])
    swap.warmup()
    pairs = random_pairs(random.Random(count), count, 2100)
    model = exchanged if name == "swap" else moved
    expected = model(contents([cache], 2100), pairs)
    runs.clear()
    with no_compile():
        getattr(swap, name)(pairs)
    assert runs == [f"{name}s[{name}s={pad}]" for pad in pads]
    assert equal(contents([cache], 2100), expected)


def test_no_pairs_and_padding_run_nothing(runs):
    cache = small_cache()
    swap, before = ready(cache), contents(list(cache.buffers()))
    runs.clear()
    for pairs in ([], [(0, 0)], [(0, 0), (0, 0)], np.zeros((3, 2), dtype=np.int32)):
        swap.swap(pairs)
        swap.move(pairs)
    assert runs == []
    assert equal(contents(list(cache.buffers())), before)


def test_padding_changes_no_block_even_if_the_null_block_is_nan():
    cache = small_cache()
    for tensor in cache.buffers():
        tensor[:4] = torch.nan
    swap, before = BlockSwap(cache, pad_sizes=(8,)), contents([*cache.buffers()])
    swap.warmup()
    swap.swap([(3, 9)])
    swap.move([(5, 6), (0, 0)])
    expected = moved(exchanged(before, [(3, 9)]), [(5, 6)])
    assert equal(contents([*cache.buffers()]), expected)


def test_warmup_reports_both_graphs_of_every_pad_size():
    events: list[Any] = []
    report = BlockSwap(small_cache()).warmup(events.append)
    found = {str(result.bucket) for result in report.captured}
    assert found == {f"{axis}={pad}" for axis in ("swaps", "moves") for pad in PAD_SIZES}
    assert len(report.results) == 2 * len(PAD_SIZES)
    assert sum(event.status == "captured" for event in events) == 2 * len(PAD_SIZES)


def test_pairs_may_be_an_array_or_an_iterator():
    cache = small_cache()
    swap, before = ready(cache), contents([*cache.buffers()])
    swap.swap(np.array([[1, 2], [3, 4]], dtype=np.int32))
    swap.swap(iter([(2, 1)]))
    assert equal(contents([*cache.buffers()]), exchanged(before, [(3, 4)]))


@pytest.mark.parametrize("how", ["swap", "move"])
def test_pairs_that_lie_in_the_cache_itself_are_read_before_it_is_written(how: str) -> None:
    cache = torch.zeros(BLOCKS, 4, dtype=torch.int64)
    noise([cache])
    cache[2] = torch.tensor([2, 7, 3, 9])
    swap = BlockSwap([cache], pad_sizes=[8])
    swap.warmup()
    before, pairs = contents([cache]), [(2, 7), (3, 9)]
    getattr(swap, how)(cache.numpy()[2].reshape(2, 2))
    expected = exchanged(before, pairs) if how == "swap" else moved(before, pairs)
    assert np.array_equal(contents([cache]), expected)


def test_the_forward_refuses_indices_in_the_cache_it_writes() -> None:
    cache = torch.zeros(BLOCKS, 4, dtype=torch.int64)
    cache[2] = torch.tensor([2, 7, 3, 9])
    before = cache.clone()
    swap = BlockSwap([cache])
    inside = swap.get_buffer("rows_0")[2]
    with pytest.raises(RuntimeError):
        swap(inside[:2], inside[2:])
    assert torch.equal(cache, before)


def test_a_move_may_copy_one_source_to_several_blocks():
    cache = small_cache()
    swap, before = ready(cache), contents([*cache.buffers()])
    swap.move([(1, 2), (1, 3), (4, 5)])
    expected = moved(before, [(1, 2), (1, 3), (4, 5)])
    assert equal(contents([*cache.buffers()]), expected)


def test_calls_work_with_and_without_grad_mode():
    cache = small_cache()
    swap, before = ready(cache, pad_sizes=(4,)), contents([*cache.buffers()])
    swap.swap([(1, 2)])
    with torch.no_grad():
        swap.swap([(1, 2)])
    assert equal(contents([*cache.buffers()]), before)


@given(st.data())
def test_exchanging_twice_is_nothing_and_moves_equal_numpy(data):
    blocks = data.draw(st.integers(2, 40))
    cache = torch.zeros(blocks, 3, dtype=torch.bfloat16)
    noise([cache], data.draw(st.integers(0, 99)))
    chosen = data.draw(st.permutations(range(1, blocks)))
    count = data.draw(st.integers(0, len(chosen) // 2))
    pairs = list(zip(chosen[:count], chosen[count : 2 * count], strict=True))
    swap = ready([cache], pad_sizes=data.draw(st.sets(st.integers(1, 9), min_size=1).map(list)))
    before = contents([cache], blocks)
    swap.swap(pairs)
    assert equal(contents([cache], blocks), exchanged(before, pairs))
    swap.swap(pairs)
    assert equal(contents([cache], blocks), before)
    swap.move(pairs)
    assert equal(contents([cache], blocks), moved(before, pairs))


def test_without_exchanges_one_graph_less_is_captured_and_only_moves_run():
    cache = small_cache(torch.float32)
    swap = BlockSwap(cache, pad_sizes=(4,), exchanges=False)
    assert swap.pending == 1 and len(swap.warmup().captured) == 1 and swap.pending == 0
    before = contents(list(cache.buffers()))
    swap.move([(2, 3)])
    with pytest.raises(RuntimeError, match="create it with exchanges=True"):
        swap.swap([(2, 4)])
    assert equal(contents(list(cache.buffers())), moved(before, [(2, 3)]))


def test_blocks_that_are_taken_can_be_put_anywhere_and_again():
    cache = small_cache()
    swap, before = ready(cache), contents([*cache.buffers()])
    taken = swap.take([5, 7])
    swap.move([(1, 5), (2, 7)])
    for _ in range(2):
        swap.put([7, 9], taken)
    expected = moved(before, [(1, 5), (5, 7), (7, 9)])
    assert equal(contents([*cache.buffers()]), expected)


def test_contents_of_other_shapes_write_nothing():
    cache = small_cache()
    swap, before = ready(cache), contents([*cache.buffers()])
    taken = swap.take([5, 7])
    for wrong in (taken[:-1], [each[:1] for each in taken], [*taken[:-1], taken[-1][:, :1]]):
        with pytest.raises(ValueError, match=r"pass what take\(\) returned"):
            swap.put([1, 2], wrong)
    assert equal(contents([*cache.buffers()]), before)
