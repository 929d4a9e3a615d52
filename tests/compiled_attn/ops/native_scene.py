"""Random steps over a paged cache, and their results by dense attention in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from compiled_attn.cache.quantisation import QUANTISED, quantise
from compiled_attn.ops.call import PagedCall
from compiled_attn.testing import reference

FLOAT_TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Largest error of an output, with values of about 1: some units in the last place."""


@dataclass
class Scene:
    """One step: the arguments of an op, and what its caches really hold, in float64."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    scale: float
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def step(self) -> tuple[Any, ...]:
        """Arguments after the caches."""
        return self.block_table, self.seq_lens, self.query_start_loc, self.scale

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Positional arguments of `paged_attention`."""
        return self.query, self.key_cache, self.value_cache, *self.step

    @property
    def call(self) -> PagedCall:
        """The same as a `PagedCall`."""
        return PagedCall.of(*self.arguments, **self.options)

    def each_alone(self) -> Iterator[tuple[slice, tuple[Any, ...]]]:
        """The query rows of each request, and the positional arguments of it alone."""
        starts = self.query_start_loc.tolist()
        for request, (first, end) in enumerate(pairwise(starts)):
            own = slice(request, request + 1)
            step = self.block_table[own], self.seq_lens[own], torch.tensor([0, end - first]).int()
            query, caches = self.query[first:end], (self.key_cache, self.value_cache)
            yield slice(first, end), (query, *caches, *step, self.scale)


def scene(
    requests: list[tuple[int, int]],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 16,
    value_dim: int | None = None,
    size: int = 4,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    layout: str = "NHD",
    padding: int = 0,
    padded_requests: int = 0,
    seed: int = 0,
    poison: float | None = math.nan,
    **options: Any,
) -> Scene:
    """A step of requests ``(query_len, seq_len)`` over blocks in random order.

    Unused slots and the query rows of padding hold ``poison``.
    """
    gen = torch.Generator().manual_seed(seed)
    cache_dtype = cache_dtype or dtype
    used = [-(-length // size) for _, length in requests]
    blocks, width = sum(used) + 3, max([*used, 1]) + 2
    order = (torch.randperm(blocks - 1, generator=gen) + 1).int()
    table = torch.full((len(requests) + padded_requests, width), 2**30, dtype=torch.int32)
    for request, count in enumerate(used):
        table[request, :count] = order[sum(used[:request]) :][:count]
    tokens = sum(count for count, _ in requests)
    query = torch.randn(tokens + padding, heads, dim, generator=gen).to(dtype)
    if poison is not None:
        query[tokens:] = poison
    lengths = torch.tensor([n for _, n in requests] + [0] * padded_requests).int()
    starts = torch.tensor([0] + [n for n, _ in requests] + [0] * padded_requests).cumsum(0).int()
    step = Scene(query, query, query, table, lengths, starts, dim**-0.5, options)
    for which, size_of_row in (("key", dim), ("value", value_dim or dim)):
        rows = torch.randn(blocks, size, kv_heads, size_of_row, generator=gen)
        cache, row_scale = _stored(rows, cache_dtype)
        if poison is not None:
            _poison(cache, row_scale, step, size, poison)
        setattr(step, f"{which}_cache", _laid_out(cache, layout))
        if row_scale is not None:
            step.options[f"{which}_scale"] = row_scale
    return step


def _stored(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    return quantise(rows, dtype) if dtype in QUANTISED else (rows.to(dtype), None)


def _poison(cache: Tensor, scale: Tensor | None, step: Scene, size: int, poison: float) -> None:
    free = torch.ones(cache.shape[:2], dtype=torch.bool)
    for request, length in enumerate(step.seq_lens.tolist()):
        for position in range(length):
            free[step.block_table[request, position // size], position % size] = False
    if scale is None:
        cache[free] = poison
    else:
        scale[free] = poison


def _laid_out(cache: Tensor, layout: str) -> Tensor:
    if layout == "HND":
        return cache.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "strided":  # one of two layers, with a gap after every row
        shape = (*cache.shape[:2], 2, cache.shape[2], cache.shape[3] + 3)
        wide = torch.zeros(shape, dtype=torch.float32).to(cache.dtype)
        view = wide[:, :, 1, :, : cache.shape[3]]
        view.copy_(cache)
        return view
    return cache


def dense(step: Scene) -> tuple[Tensor, Tensor]:
    """Returns the exact results of `paged_attention`, in float64."""
    return reference.paged_attention(*step.arguments, **step.options)


def assert_right(result: tuple[Tensor, Tensor], step: Scene, *, factor: float = 1.0) -> None:
    """Raises unless outputs and log-sum-exps are those of `dense`."""
    out, lse = result
    want, want_lse = dense(step)
    tolerance = FLOAT_TOLERANCE[step.query.dtype] * factor
    assert out.dtype == step.query.dtype and lse.dtype == torch.float32
    assert out.is_contiguous() and lse.is_contiguous()
    torch.testing.assert_close(out.double(), want, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), want_lse, rtol=tolerance, atol=tolerance)


def new_tokens(step: Scene, seed: int = 5):
    """Keys, values and slots of a step's tokens; padding goes to the null block."""
    gen = torch.Generator().manual_seed(seed)
    tokens, size = step.query.shape[0], step.key_cache.shape[1]
    kv_heads = step.key_cache.shape[2]
    key = torch.randn(tokens, kv_heads, step.query.shape[2], generator=gen).to(step.query.dtype)
    value = torch.randn(tokens, kv_heads, step.value_cache.shape[3], generator=gen)
    slots = torch.zeros(tokens, dtype=torch.int64)
    for request, length in enumerate(step.seq_lens.tolist()):
        begin, end = step.query_start_loc[request : request + 2].tolist()
        for row in range(begin, end):
            position = length - (end - row)
            slots[row] = step.block_table[request, position // size] * size + position % size
    return key, value.to(step.query.dtype), slots
