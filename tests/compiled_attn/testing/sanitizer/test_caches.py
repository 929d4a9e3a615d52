"""The sanitizer of a cache whose steps the caller names, with our layers and foreign kernels."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from compiled_attn import BatchBuilder, PagedKVCache, Request, UnifiedAttention
from compiled_attn.testing import CorruptCache, StepTokens, kv_sanitizer

BLOCK, HEADS, DIM = 4, 2, 8
TOKENS = {"a": [5, 6, 7, 8, 9, 10], "b": [5, 6, 7, 8, 11, 12]}


def tokens(name: str, start: int, count: int, blocks: list[int]) -> StepTokens:
    return StepTokens(name, TOKENS[name], start, count, blocks)


def cache_of(layers: int = 2) -> PagedKVCache:
    return PagedKVCache(layers, 8, BLOCK, HEADS, DIM)


def run(layer: UnifiedAttention, metadata: Any) -> torch.Tensor:
    rows = torch.randn(len(metadata.slot_mapping), HEADS, DIM)
    return layer(rows, rows, rows, metadata)


def metadata_of(*parts: StepTokens, tables: bool = False, blocks: Any = None) -> Any:
    """The metadata of a step; ``blocks`` replaces the tables."""
    requests = [
        Request(
            part.tokens[part.start : part.start + part.count],
            part.start,
            part.blocks if blocks is None else blocks[number],
        )
        for number, part in enumerate(parts)
    ]
    builder = BatchBuilder(8, BLOCK)
    plan = builder.plan_tables(requests) if tables else builder.plan(requests)
    return plan.fill().metadata(BLOCK)


@pytest.mark.parametrize("tables", [False, True])
def test_right_steps_are_silent_and_change_nothing(tables: bool) -> None:
    outs = []
    for is_checked in (False, True):
        torch.manual_seed(0)
        cache = cache_of()
        names = dict(cache.named_buffers())
        layers = [UnifiedAttention(cache, each) for each in range(2)]
        steps = [
            (StepTokens("a", TOKENS["a"], 0, 5, [3, 1]), StepTokens("b", TOKENS["b"], 0, 4, [2])),
            # b shares the first block of a, which has the same tokens.
            (
                StepTokens("a", TOKENS["a"], 5, 1, [3, 1]),
                StepTokens("b", TOKENS["b"], 4, 2, [3, 4]),
            ),
        ]
        with kv_sanitizer(cache) if is_checked else nullcontext() as watch:
            for step in steps:
                if is_checked:
                    watch.step(step)
                metadata = metadata_of(*step, tables=tables)
                outs += [run(layer, metadata) for layer in layers]
        assert cache.shadow is None
        assert dict(cache.named_buffers()).keys() == names.keys()
    half = len(outs) // 2
    assert all(map(torch.equal, outs[:half], outs[half:]))


@pytest.mark.parametrize("seen", [2, 1])
def test_a_step_may_read_the_first_blocks_of_the_cache(seen: int) -> None:
    cache = cache_of(1)
    layer = UnifiedAttention(cache, 0)
    prompt, decode = tokens("a", 0, 5, [1, 2]), tokens("a", 5, 1, [1, 2])
    bias = torch.full((3, BLOCK), -torch.inf)
    bias[1], bias[2, :seen] = 0, 0  # positions 0 to 3, 4 and 5
    whole = replace(
        metadata_of(decode),
        unique_blocks=3,
        unique_block_mapping=torch.zeros(3, dtype=torch.int64),
        unique_bias=bias,
        unique_starts=torch.tensor([0, 0, 4]),
    )
    error = nullcontext() if seen == 2 else pytest.raises(CorruptCache, match="stale_table")
    with error, kv_sanitizer(cache) as watch:
        watch.step([prompt])
        run(layer, metadata_of(prompt))
        watch.step([decode])
        run(layer, whole)
        watch.check()


@pytest.mark.parametrize("tables", [False, True])
@pytest.mark.parametrize(
    ("kind", "blocks"),
    [("stale_table", [5, 1]), ("wrong_position", [1, 3]), ("use_after_free", [6, 1])],
)
def test_a_wrong_table_is_found_in_its_layer(kind: str, blocks: list[int], tables: bool) -> None:
    cache = cache_of()
    layers = [UnifiedAttention(cache, each) for each in range(2)]
    with pytest.raises(CorruptCache, match=kind) as caught, kv_sanitizer(cache) as watch:
        first = StepTokens("a", TOKENS["a"], 0, 5, [3, 1])
        other = StepTokens("c", [1, 2, 3, 4], 0, 4, [5])
        watch.step([first, other])
        for layer in layers:
            run(layer, metadata_of(first, other, tables=tables))
        watch.free([6])
        second = StepTokens("a", TOKENS["a"], 5, 1, [3, 1])
        watch.step([second])
        right = metadata_of(second, tables=tables)
        wrong = metadata_of(second, tables=tables, blocks=[blocks])
        run(layers[0], right)
        run(layers[1], wrong if kind == "wrong_position" else _reads(right, blocks[0]))
    assert cache.shadow is None
    error = caught.value
    assert (error.kind, error.request, error.step) == (kind, "a", 2)
    if kind != "wrong_position":
        assert (error.layer, error.block, error.position) == (1, blocks[0], 0)


def _reads(metadata: Any, block: int) -> Any:
    """The metadata, with another first block."""
    if metadata.block_tables is not None:
        tables = metadata.block_tables.clone()
        tables[0, 0] = block
        return replace(metadata, block_tables=tables)
    blocks = metadata.unique_blocks.clone()
    blocks[0] = block
    return replace(metadata, unique_blocks=blocks)


def test_a_layer_that_is_called_again_keeps_the_first_error() -> None:
    cache = cache_of(1)
    layer = UnifiedAttention(cache)
    with pytest.raises(CorruptCache) as caught, kv_sanitizer(cache) as watch:
        watch.step([tokens("a", 0, 5, [3, 1])])
        run(layer, metadata_of(tokens("a", 0, 5, [3, 1])))
        watch.step([step := tokens("a", 5, 1, [3, 1])])
        run(layer, metadata_of(step, blocks=[[5, 1]], tables=True))
        run(layer, metadata_of(step, tables=True))
    assert (caught.value.kind, caught.value.block) == ("use_after_free", 5)


def test_the_null_block_belongs_to_nobody() -> None:
    with kv_sanitizer(cache_of()) as watch, pytest.raises(ValueError, match="from 1 on"):
        watch.step([tokens("a", 0, 5, [0, 1])])


def test_a_cache_that_is_checked_is_refused() -> None:
    cache = cache_of()
    twice = pytest.raises(ValueError, match="leave one of them out")
    with kv_sanitizer(cache), twice, kv_sanitizer(cache):
        pass
    assert cache.shadow is None
    with pytest.raises(TypeError, match="expected an Engine"), kv_sanitizer(3):  # type: ignore[call-overload]
        pass


def test_layers_that_share_memory_are_refused() -> None:
    keys = torch.zeros(8, BLOCK, HEADS, DIM)
    shared = pytest.raises(ValueError, match="memory of their own")
    with shared, kv_sanitizer([keys, keys[2:]], block_size=BLOCK):
        pass


def reshape_and_cache(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:  # fmt: skip
    """Writes as vLLM's does: slot -1 is skipped."""
    kept = slot_mapping >= 0
    key_cache.view(-1, HEADS, DIM)[slot_mapping[kept]] = key[kept]
    value_cache.view(-1, HEADS, DIM)[slot_mapping[kept]] = value[kept]


def paged_decode(
    query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor,
    block_tables: torch.Tensor, seq_lens: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Reads the first key of each row."""
    return key_cache[block_tables[:, 0], 0]


def foreign(fault: Callable[[dict[str, torch.Tensor]], None] = lambda step: None) -> torch.Tensor:
    """A prompt and a decode of two requests, padded to three rows, with foreign kernels."""
    caches = torch.zeros(2, 8, BLOCK, HEADS, DIM)
    with kv_sanitizer([(caches[0], caches[1])], block_size=BLOCK) as watch:
        write, read = watch.wrap(reshape_and_cache), watch.wrap(paged_decode)
        parts = [StepTokens("a", TOKENS["a"], 0, 5, [3, 1]), StepTokens("b", [1, 2], 0, 1, [2])]
        rows = torch.randn(8, HEADS, DIM)
        slots = torch.tensor([12, 13, 14, 15, 4, 8, -1, -1])
        watch.step(parts)
        write(rows, rows, caches[0], caches[1], slots)
        watch.free([5])
        parts = [StepTokens("a", TOKENS["a"], 5, 1, [3, 1]), StepTokens("b", [1, 2], 1, 1, [2])]
        step = {
            "slots": torch.tensor([5, 9, -1]),
            "tables": torch.tensor([[3, 1], [2, 0], [0, 0]]),
            "lengths": torch.tensor([6, 2, 1]),
        }
        fault(step)
        watch.step(parts)
        write(rows[:3], rows[:3], caches[0], caches[1], step["slots"])
        return read(rows[:3], caches[0], caches[1], step["tables"], step["lengths"])


def test_foreign_kernels_are_silent_if_they_are_right() -> None:
    assert foreign().isfinite().all()


@pytest.mark.parametrize(
    ("kind", "name", "at", "value"),
    [
        ("padding_write", "slots", 2, 31),
        ("two_writers", "slots", 1, 5),
        ("wrong_position", "slots", 0, 6),
        ("use_after_free", "slots", 0, 21),
        ("wrong_owner", "slots", 0, 10),
        ("stale_table", "lengths", 0, 5),
        ("use_after_free", "tables", (0, 0), 5),
        ("wrong_position", "tables", (0, 0), 1),
        ("stale_table", "tables", (1, 0), 0),
    ],
)
def test_faults_of_foreign_kernels(kind: str, name: str, at: Any, value: int) -> None:
    def fault(step: dict[str, torch.Tensor]) -> None:
        step[name][at] = value

    with pytest.raises(CorruptCache) as caught:
        foreign(fault)
    assert caught.value.kind == kind, str(caught.value)


def test_a_kernel_without_known_arguments_is_refused() -> None:
    keys = torch.zeros(8, BLOCK, HEADS, DIM)
    unknown = pytest.raises(TypeError, match="key cache and either slot_mapping")
    with kv_sanitizer([keys], block_size=BLOCK) as watch, unknown:
        watch.wrap(lambda query, pages: query)
