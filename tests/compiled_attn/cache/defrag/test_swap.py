"""Exchanges and moves of blocks, byte for byte, against numpy; captured, padded, split, undone."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from compiled_attn import PagedKVCache
from compiled_attn.cache.defrag import PAD_SIZES, BlockSwap
from compiled_attn.compat.paged.layouts import LAYOUTS, convert_key, convert_value, empty_caches
from graphs import CapturedGraph, CaptureError, capture, no_compile

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int8,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
BLOCKS = 24


def noise(tensors: Sequence[Tensor], seed: int = 0) -> None:
    """Random bits, NaNs of every kind among them, in the whole memory of the tensors."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors:
        memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        memory.random_(0, 256, generator=generator)


def contents(tensors: Sequence[Tensor], blocks: int = BLOCKS) -> list[np.ndarray]:
    """The bytes of each block in logical order, ``[blocks, bytes]`` for each tensor, copied."""
    dense = [tensor.reshape(blocks, -1).clone() for tensor in tensors]
    return [each.view(torch.uint8).numpy() for each in dense]


def exchanged(before: list[np.ndarray], pairs: Sequence[tuple[int, int]]) -> list[np.ndarray]:
    after = [each.copy() for each in before]
    for (a, b), (old, new) in itertools.product(pairs, zip(before, after, strict=True)):
        new[a], new[b] = old[b], old[a]
    return after


def moved(before: list[np.ndarray], pairs: Sequence[tuple[int, int]]) -> list[np.ndarray]:
    after = [each.copy() for each in before]
    for (a, b), (old, new) in itertools.product(pairs, zip(before, after, strict=True)):
        new[b] = old[a]
    return after


def equal(first: list[np.ndarray], second: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def ready(buffers: Any, *args: Any, **options: Any) -> BlockSwap:
    swap = BlockSwap(buffers, *args, **({"pad_sizes": (4, 16)} | options))
    swap.warmup()
    return swap


def small_cache(dtype: torch.dtype = torch.float32, **options: Any) -> PagedKVCache:
    cache = PagedKVCache(2, BLOCKS, 4, 2, 16, dtype=dtype, **options)
    noise(list(cache.buffers()))
    return cache


def drawn(rng: random.Random, count: int, blocks: int = BLOCKS) -> list[tuple[int, int]]:
    places = rng.sample(range(1, blocks), 2 * count)
    return list(zip(places[:count], places[count:], strict=True))


def assert_copies(swap: BlockSwap, tensors: Sequence[Tensor], blocks: int = BLOCKS) -> None:
    """Both operations, more pairs than the largest pad size among them, do what numpy does."""
    rng = random.Random(1)
    for operation, model in ((swap.swap, exchanged), (swap.move, moved)):
        for count in (1, 4, 7, 0, (blocks - 1) // 2):
            pairs = drawn(rng, count, blocks)
            expected = model(contents(tensors, blocks), pairs)
            operation(pairs)
            assert equal(contents(tensors, blocks), expected)


@pytest.fixture
def runs(monkeypatch) -> list[str]:
    """The names of the captured graphs that ran."""
    names: list[str] = []
    run = CapturedGraph.run

    def counted(graph: CapturedGraph, *inputs: Any) -> Any:
        names.append(graph.name)
        return run(graph, *inputs)

    monkeypatch.setattr(CapturedGraph, "run", counted)
    return names


# Every cache of the library


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
    kept = memory[0].clone()
    assert_copies(ready([cache]), [cache])
    assert memory[0] == kept


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_graphs_copy_as_eager_ones_and_compile_nothing_later(backend, runs):
    cache = PagedKVCache(1, BLOCKS, 4, 2, 16, dtype=torch.float8_e4m3fn)
    noise(list(cache.buffers()))
    swap = ready(cache, backend=backend, pad_sizes=(4,))
    runs.clear()
    with no_compile():
        assert_copies(swap, list(cache.buffers()))
    # 1, 4, 7, 0 and 11 pairs
    assert runs == ["swaps[swaps=4]"] * 7 + ["moves[moves=4]"] * 7


# Captured graphs and their pad sizes


EDGES = {1: [8], 8: [8], 9: [16], 512: [512], 513: [512, 8], 1030: [512, 512, 8]}


@pytest.mark.parametrize(("count", "pads"), EDGES.items())
@pytest.mark.parametrize("name", ["swap", "move"])
def test_a_public_call_replays_the_graphs_that_hold_its_pairs(name, count, pads, runs):
    cache = torch.zeros(2100, 2, dtype=torch.int32)
    noise([cache])
    swap = BlockSwap([cache])
    swap.warmup()
    pairs = drawn(random.Random(count), count, 2100)
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


def test_padding_leaves_every_place_as_it_is_even_null_blocks_of_nan():
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


def test_the_forward_refuses_places_in_the_cache_it_writes() -> None:
    cache = torch.zeros(BLOCKS, 4, dtype=torch.int64)
    cache[2] = torch.tensor([2, 7, 3, 9])
    before = cache.clone()
    swap = BlockSwap([cache])
    places = swap.get_buffer("rows_0")[2]
    with pytest.raises(RuntimeError):
        swap(places[:2], places[2:])
    assert torch.equal(cache, before)


def test_a_move_may_copy_one_source_to_several_places():
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


@settings(max_examples=60)
@given(st.data())
def test_exchanging_twice_is_nothing_and_moves_equal_numpy(data):
    blocks = data.draw(st.integers(2, 40))
    cache = torch.zeros(blocks, 3, dtype=torch.bfloat16)
    noise([cache], data.draw(st.integers(0, 99)))
    places = data.draw(st.permutations(range(1, blocks)))
    count = data.draw(st.integers(0, len(places) // 2))
    pairs = list(zip(places[:count], places[count : 2 * count], strict=True))
    swap = ready([cache], pad_sizes=data.draw(st.sets(st.integers(1, 9), min_size=1).map(list)))
    before = contents([cache], blocks)
    swap.swap(pairs)
    assert equal(contents([cache], blocks), exchanged(before, pairs))
    swap.swap(pairs)
    assert equal(contents([cache], blocks), before)
    swap.move(pairs)
    assert equal(contents([cache], blocks), moved(before, pairs))


# Bad input changes nothing

WRONG_PAIRS = {
    "out of range": ([(1, 2), (3, BLOCKS)], ValueError, rf"got {BLOCKS} in pair \(3, {BLOCKS}\)"),
    "negative": ([(4, -1)], ValueError, r"got -1 in pair \(4, -1\)"),
    "from null": ([(0, 3)], ValueError, r"null block 0.*\(0, 3\)"),
    "to null": ([(3, 0)], ValueError, r"null block 0.*\(3, 0\)"),
    "with itself": ([(3, 3)], ValueError, "3"),
    "destination twice": ([(1, 5), (2, 5)], ValueError, "5 twice"),
    "chain": ([(1, 2), (2, 3)], ValueError, "place 2"),
    "floats": ([(1.0, 2.0)], TypeError, "float64"),
    "booleans": ([(True, False)], TypeError, "bool"),
    "triples": ([(1, 2, 3)], ValueError, r"\[1, 3\]"),
    "no pairs": ([1, 2], ValueError, r"\[2\]"),
}


@pytest.mark.parametrize(("pairs", "error", "text"), WRONG_PAIRS.values(), ids=WRONG_PAIRS)
@pytest.mark.parametrize("name", ["swap", "move"])
def test_wrong_pairs_are_an_error_that_names_them_and_nothing_changes(
    name, pairs, error, text, runs
):
    cache = small_cache()
    swap, before = ready(cache), contents([*cache.buffers()])
    runs.clear()
    with pytest.raises(error, match=text):
        getattr(swap, name)(pairs)
    assert runs == []
    assert equal(contents([*cache.buffers()]), before)


def test_a_source_that_is_exchanged_twice_is_an_error():
    with pytest.raises(ValueError, match="place 1 twice"):
        ready(small_cache()).swap([(1, 2), (1, 3)])


WRONG_BUFFERS: dict[str, tuple[Callable[[], Any], int | None, str]] = {
    "flat without a number of blocks that fits": (
        lambda: [torch.zeros(96, 2)],
        25,
        r"25 blocks.*\[96, 2\]",
    ),
    "different sizes": (lambda: [torch.zeros(24, 2), torch.zeros(20, 2)], None, r"24.*\[20, 2\]"),
    "no tensors": (list, None, "one device, got 0"),
    "a scalar": (lambda: [torch.zeros(())], None, "num_blocks"),
    "an empty tensor": (lambda: [torch.zeros(4, 0)], None, r"\[4, 0\]"),
    "one block": (lambda: [torch.zeros(1, 3)], None, ">= 2"),
    "blocks in pieces": (
        lambda: [torch.zeros(2, 24, 4).transpose(0, 1)],
        None,
        r"one piece.*\[24, 2, 4\]",
    ),
    "a repeated block": (lambda: [torch.zeros(1, 4).expand(24, 4)], None, "one piece"),
    "the same tensor twice": (lambda: [torch.zeros(24, 2)] * 2, None, "0 and 1"),
    "two views of one memory": (lambda: overlapping(), None, "0 and 1"),
    "two devices": (
        lambda: [torch.zeros(24, 2), torch.zeros(24, 2, device="meta")],
        None,
        "cpu.*meta",
    ),
    "another size than the cache's": (small_cache, 25, "24 of the cache, got 25"),
}


def overlapping() -> list[Tensor]:
    memory = torch.zeros(24, 6)
    return [memory[:, :4], memory[:, 3:]]


@pytest.mark.parametrize(
    ("buffers", "num_blocks", "text"), WRONG_BUFFERS.values(), ids=WRONG_BUFFERS
)
def test_tensors_that_do_not_fit_are_an_error_that_says_why(buffers, num_blocks, text):
    with pytest.raises(ValueError, match=text):
        BlockSwap(buffers(), num_blocks)


def test_what_is_no_tensor_is_an_error():
    with pytest.raises(TypeError, match="str"):
        BlockSwap(["cache"])  # type: ignore[list-item]


@pytest.mark.parametrize("sizes", [(), (0,), (8, -1)])
def test_pad_sizes_that_make_no_sense_are_an_error(sizes):
    with pytest.raises(ValueError, match=r"at least one bucket|pad size >= 1"):
        BlockSwap(small_cache(), pad_sizes=sizes)


# Life and death


def test_calls_before_warmup_and_after_close_are_errors():
    cache = small_cache()
    swap, before = BlockSwap(cache, pad_sizes=(4,)), contents([*cache.buffers()])
    for call in (swap.swap, swap.move):
        with pytest.raises(RuntimeError, match=r"call warmup\(\)"):
            call([(1, 2)])
    swap.warmup()
    swap.close()
    swap.close()
    for use in (lambda: swap.swap([(1, 2)]), lambda: swap.move([]), swap.warmup):
        with pytest.raises(RuntimeError, match="closed"):
            use()
    assert equal(contents([*cache.buffers()]), before)


def test_a_pad_size_that_cannot_be_captured_is_an_error_unless_a_larger_one_may_serve(
    monkeypatch, runs
):
    def failing(function: Any, inputs: Any, **options: Any) -> CapturedGraph:
        if "swaps=4" in options["name"]:
            raise CaptureError(options["name"], "no memory")
        return capture(function, inputs, **options)

    monkeypatch.setattr("graphs.warmup.capturing.capture", failing)
    with pytest.raises(CaptureError, match="no memory"):
        BlockSwap(small_cache(), pad_sizes=(4, 16)).warmup()
    swap = BlockSwap(small_cache(), pad_sizes=(4, 16), strict=False)
    assert len(swap.warmup().failed) == 1
    runs.clear()
    swap.swap([(1, 2)])
    assert runs == ["swaps[swaps=16]"]
    with pytest.raises(CaptureError, match="no memory"):
        BlockSwap(small_cache(), pad_sizes=(4,), strict=False).warmup()


@pytest.mark.parametrize("where", ["half", "double", "to", "replaced"])
def test_a_cache_that_went_elsewhere_is_an_error_and_not_exchanged(where):
    cache = small_cache()
    swap = ready(cache)
    if where == "replaced":
        cache.register_buffer("key_0", cache.key(0).clone(), persistent=False)
    elif where == "to":
        cache.to(torch.bfloat16)
    else:
        getattr(cache, where)()
    before = contents([*cache.buffers()])
    with pytest.raises(RuntimeError, match="moved, cast or replaced"):
        swap.swap([(1, 2)])
    assert equal(contents([*cache.buffers()]), before)


def test_moving_the_module_is_an_error_and_what_moves_nothing_is_not():
    cache = small_cache()
    swap, before = ready(cache), contents([*cache.buffers()])
    with pytest.raises(RuntimeError, match="stay with its cache"):
        nn.Sequential(swap).to("meta")
    assert swap.to("cpu").half().eval() is swap
    swap.swap([(1, 2)])
    assert equal(contents([*cache.buffers()]), exchanged(before, [(1, 2)]))


def test_a_deep_copy_is_an_error_as_it_has_no_cache():
    with pytest.raises(RuntimeError, match="moved, cast or replaced"):
        copy.deepcopy(ready(small_cache())).swap([(1, 2)])


def test_the_memory_of_the_cache_is_registered_and_in_no_checkpoint():
    cache = small_cache()
    swap = BlockSwap(cache)
    assert swap.state_dict() == {}
    assert len(list(swap.buffers())) == 8  # rows, and the same memory to read from
    addresses = {tensor.data_ptr() for tensor in cache.buffers()}
    assert {rows.data_ptr() for rows in swap.buffers()} == addresses
    assert f"num_blocks={BLOCKS}" in repr(swap)


# A copy that fails midway


class Broken(Exception):
    pass


@pytest.fixture
def fail_at(monkeypatch) -> Callable[[int], None]:
    """Makes the k-th run of a graph from now on raise before it does anything; 0: none."""
    run, state = CapturedGraph.run, {"runs": 0, "at": 0}

    def failing(graph: CapturedGraph, *inputs: Any) -> Any:
        state["runs"] += 1
        if state["runs"] == state["at"]:
            raise Broken
        return run(graph, *inputs)

    def arm(at: int) -> None:
        state.update(runs=0, at=at)

    monkeypatch.setattr(CapturedGraph, "run", failing)
    return arm


@pytest.mark.parametrize("at", [1, 2, 3])
def test_an_exchange_of_several_calls_that_fails_midway_changes_nothing(at, fail_at):
    cache = small_cache()
    swap, before = ready(cache, pad_sizes=(4,)), contents([*cache.buffers()])
    pairs = drawn(random.Random(at), 10)
    fail_at(at)
    with pytest.raises(Broken):
        swap.swap(pairs)
    assert equal(contents([*cache.buffers()]), before)
    fail_at(0)
    swap.swap(pairs)
    assert equal(contents([*cache.buffers()]), exchanged(before, pairs))


class FailingOp(TorchDispatchMode):
    """Makes the k-th gather or write from now on raise, and counts them."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.count = at, 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op in (torch.ops.aten.index_select.default, torch.ops.aten.index_copy_.default):
            self.count += 1
            if self.count == self.at:
                raise Broken
        return op(*args, **(kwargs or {}))


def test_an_eager_exchange_that_fails_at_any_operation_changes_nothing():
    cache = small_cache(torch.int8)
    swap, before = ready(cache, pad_sizes=(4,)), contents([*cache.buffers()])
    pairs = drawn(random.Random(0), 6)
    with FailingOp(0) as all_of_it:
        swap.swap(pairs)
        swap.swap(pairs)
    assert all_of_it.count == 2 * 2 * 4 * 8  # calls, graph runs, operations, tensors
    for at in range(1, 2 * 4 * 8 + 1):
        with pytest.raises(Broken), FailingOp(at):
            swap.swap(pairs)
        assert equal(contents([*cache.buffers()]), before), at


def test_a_move_that_fails_midway_leaves_its_sources(fail_at):
    cache = small_cache()
    swap, before = ready(cache, pad_sizes=(4,)), contents([*cache.buffers()])
    pairs = drawn(random.Random(0), 10)
    fail_at(2)
    with pytest.raises(Broken):
        swap.move(pairs)
    assert equal(contents([*cache.buffers()]), moved(before, pairs[:4]))
