"""Steps of paged attention of one size, and what each must give and leave in the caches."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from compiled_attn.compat.paged import PagedAttention, paged_attention_reference
from tests.compiled_attn.compat.paged.scene import caches, put

BLOCKS, SIZE, KV_HEADS, HEADS, DIM = 300, 16, 2, 4, 64
CACHE = BLOCKS * SIZE * KV_HEADS * DIM


def module(layout: str = "packed", cached: tuple[Tensor, Tensor] | None = None, **options: Any):
    """The attention over caches of random numbers, by torch alone unless said otherwise."""
    options = {"kernel": "portable", **options}
    generator = torch.Generator().manual_seed(1)
    if cached is None:
        cached = caches(layout, BLOCKS, SIZE, KV_HEADS, DIM, torch.float32)
    for cache in cached:
        cache.copy_(torch.randn(cache.shape, generator=generator))
    scale = DIM**-0.5
    return PagedAttention(*cached, KV_HEADS, SIZE, scale, layout=layout, **options)  # type: ignore[arg-type]


def inputs(rows: int, width: int, seed: int = 0, heads: int = HEADS) -> tuple[Tensor, ...]:
    """A step of that bucket whose last row is padding; every row writes to its own last slot."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randperm(BLOCKS, generator=generator)[: rows * width].view(rows, width)
    lengths = torch.randint(1, width * SIZE + 1, (rows,), generator=generator)
    last = lengths - 1
    slots = blocks.gather(1, (last // SIZE).unsqueeze(1)).squeeze(1) * SIZE + last % SIZE
    query = torch.randn(rows, heads, DIM, generator=generator)
    key, value = torch.randn(2, rows, KV_HEADS, DIM, generator=generator)
    for tensor, padding in (
        (query, math.nan),
        (blocks, -1),
        (lengths, 0),
        (slots, -1),
        (key, math.nan),
    ):
        tensor[-1] = padding
    return query, blocks.int(), lengths.int(), key, value, slots


def by_reference(attention: PagedAttention, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What a step must give, and what it must leave in both caches, by writes token by token."""
    query, tables, lengths, key, value, slots = given
    both = attention.key_cache.clone(), attention.value_cache.clone()
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            put_one(*both, attention.layout, slot, key[row], value[row])
    out = paged_attention_reference(
        query, *both, attention.scale, tables, lengths, SIZE, layout=attention.layout
    )
    return out, *both


def put_one(key_cache, value_cache, layout: str, slot: int, key: Tensor, value: Tensor) -> None:
    block, offset = (0, slot) if layout == "flat" else divmod(slot, SIZE)
    put(key_cache, value_cache, layout, block, offset, key, value)


def assert_a_step_equals_the_reference(attention: PagedAttention, run: Any, seed: int = 0) -> None:
    given = inputs(3, 5, seed)
    out, key_cache, value_cache = by_reference(attention, given)
    got = run(*given)
    torch.testing.assert_close(got, out, atol=2e-6, rtol=1e-5)
    assert not got[-1].any()
    assert torch.equal(attention.key_cache, key_cache)
    assert torch.equal(attention.value_cache, value_cache)
