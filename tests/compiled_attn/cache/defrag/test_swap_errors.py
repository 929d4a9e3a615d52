"""Exchanges that cannot be made: bad input, a closed swap, a copy that fails midway."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from compiled_attn.cache.defrag import BlockSwap
from graphs import CapturedGraph, CaptureError, capture
from graphs.capture.contract import CaptureSpec
from tests.compiled_attn.cache.defrag.swapping import (
    BLOCKS,
    contents,
    equal,
    exchanged,
    moved,
    random_pairs,
    ready,
    small_cache,
)

# Bad input changes nothing

WRONG_PAIRS = {
    "out of range": ([(1, 2), (3, BLOCKS)], ValueError, rf"got {BLOCKS} in pair \(3, {BLOCKS}\)"),
    "negative": ([(4, -1)], ValueError, r"got -1 in pair \(4, -1\)"),
    "from null": ([(0, 3)], ValueError, r"null block 0.*\(0, 3\)"),
    "to null": ([(3, 0)], ValueError, r"null block 0.*\(3, 0\)"),
    "with itself": ([(3, 3)], ValueError, "3"),
    "destination twice": ([(1, 5), (2, 5)], ValueError, "5 twice"),
    "chain": ([(1, 2), (2, 3)], ValueError, "block 2"),
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


@pytest.mark.parametrize(
    ("blocks", "error", "text"),
    [
        ([1, 0], ValueError, r"blocks in 1\.\.23, got 0"),
        ([-1], ValueError, "got -1"),
        ([BLOCKS], ValueError, "got 24"),
        ([3, 3], ValueError, "block 3 twice"),
        ([1.5], TypeError, "integer blocks"),
        ([[1, 2]], TypeError, r"shape \[1, 2\]"),
    ],
)
def test_wrong_blocks_to_take_or_put_are_an_error_and_nothing_changes(blocks, error, text):
    cache = small_cache()
    swap, before = ready(cache), contents([*cache.buffers()])
    taken = swap.take([5, 6])
    with pytest.raises(error, match=text):
        swap.take(blocks)
    with pytest.raises(error, match=text):
        swap.put(blocks, taken)
    assert equal(contents([*cache.buffers()]), before)


def test_a_source_that_is_exchanged_twice_is_an_error():
    with pytest.raises(ValueError, match="block 1 twice"):
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
        r"contiguous.*\[24, 2, 4\]",
    ),
    "a repeated block": (lambda: [torch.zeros(1, 4).expand(24, 4)], None, "contiguous"),
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
    def failing(function: Any, inputs: Any, *, backend: CaptureSpec) -> CapturedGraph:
        if "swaps=4" in backend.name:
            raise CaptureError(backend.name, "no memory")
        return capture(function, inputs, backend=backend)

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
    pairs = random_pairs(random.Random(at), 10)
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
    pairs = random_pairs(random.Random(0), 6)
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
    pairs = random_pairs(random.Random(0), 10)
    fail_at(2)
    with pytest.raises(Broken):
        swap.move(pairs)
    assert equal(contents([*cache.buffers()]), moved(before, pairs[:4]))
