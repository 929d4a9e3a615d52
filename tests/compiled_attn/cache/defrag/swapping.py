"""Caches full of noise, and what exchanges and moves make of them in numpy."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compiled_attn import PagedKVCache
from compiled_attn.cache.defrag import BlockSwap

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


def random_pairs(rng: random.Random, count: int, blocks: int = BLOCKS) -> list[tuple[int, int]]:
    chosen = rng.sample(range(1, blocks), 2 * count)
    return list(zip(chosen[:count], chosen[count:], strict=True))


def assert_copies(swap: BlockSwap, tensors: Sequence[Tensor], blocks: int = BLOCKS) -> None:
    """Both operations, more pairs than the largest pad size among them, do what numpy does."""
    rng = random.Random(1)
    for operation, model in ((swap.swap, exchanged), (swap.move, moved)):
        for count in (1, 4, 7, 0, (blocks - 1) // 2):
            pairs = random_pairs(rng, count, blocks)
            expected = model(contents(tensors, blocks), pairs)
            operation(pairs)
            assert equal(contents(tensors, blocks), expected)
