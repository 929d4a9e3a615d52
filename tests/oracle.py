"""What all attention tests compare with: the dense attention of `compiled_attn.testing.dense`.

A `Scene` is a step of random requests over a paged cache whose every unused slot is poisoned, its
scales too. It is written independently of the library: no blocks, no buckets, no partial sums.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compiled_attn import Request
from compiled_attn.testing.dense import LARGEST, attend, dense, distances, position_bias, store

__all__ = [
    "LARGEST", "Scene", "Shape", "attend", "dense", "distances", "position_bias", "store",
]  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """Sizes and dtypes of a scene; ``latent``: a cache without V, as multi-head latent attention
    has."""

    block_size: int = 4
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 16
    num_blocks: int = 64
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    value_dim: int | None = None
    latent: bool = False

    @property
    def stored(self) -> torch.dtype:
        """Element type of the caches."""
        return self.cache_dtype or self.dtype


class Scene:
    """Random requests of one step: decodes, prompt chunks, drafts, shared prefixes."""

    def __init__(self, seed: int, shape: Shape | None = None, poison: float = math.nan) -> None:
        self.shape = s = shape or Shape()
        self.rng = np.random.default_rng(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.poison = poison
        self.key_cache, self.key_scale = self._poisoned_cache(s.head_dim)
        self.value_cache, self.value_scale = (
            (None, None) if s.latent else self._poisoned_cache(s.value_dim or s.head_dim)
        )
        # Any order of block ids, with holes.
        self.free = [int(block) for block in self.rng.permutation(np.arange(1, s.num_blocks))]
        self.requests: list[Request] = []
        self.keys: list[Tensor] = []
        self.values: list[Tensor | None] = []
        self.queries: list[Tensor] = []
        self.prefix_blocks: list[int] = []
        self.prefix: tuple[Tensor, Tensor | None] | None = None

    def share_prefix(self, blocks: int) -> Scene:
        """Later requests may start with this prefix of full blocks."""
        self.prefix_blocks = [self.free.pop() for _ in range(blocks)]
        self.prefix = self._keys_and_values(blocks * self.shape.block_size)
        return self

    def add(self, context: int, new: int, *, shared: bool = False, logits: int = 1) -> Scene:
        """A request of ``context`` cached and ``new`` new tokens; ``shared``: after the prefix."""
        s, blocks = self.shape, list(self.prefix_blocks) if shared else []
        context += len(blocks) * s.block_size
        rows = self._keys_and_values(context + new)
        if shared and self.prefix:
            for own, common in zip(rows, self.prefix, strict=True):
                if own is not None:
                    own[: len(common)] = common
        while len(blocks) * s.block_size < context + new:
            blocks.append(self.free.pop())
        tokens = self.rng.integers(0, 100, new)
        query = torch.randn(new, s.kv_heads * s.group, s.head_dim, generator=self.generator)
        self.place(Request(tokens, context, np.array(blocks), logits), *rows, query.to(s.dtype))
        return self

    def place(self, request: Request, key: Tensor, value: Tensor | None, query: Tensor) -> None:
        """A request with these rows, ``[context + new, Hk, D]``; the cache gets its context."""
        size, blocks = self.shape.block_size, request.block_table
        cached = range(request.context_len)
        slots = [int(blocks[at // size]) * size + at % size for at in cached]
        self._store(self.key_cache, self.key_scale, slots, key)
        if value is not None:
            self._store(self.value_cache, self.value_scale, slots, value)
        self.requests.append(request)
        self.keys.append(key)
        self.values.append(value)
        self.queries.append(query)

    def random(self, count: int = 5) -> Scene:
        """``count`` random requests, some with a common prefix."""
        self.share_prefix(int(self.rng.integers(1, 3)))
        for _ in range(count):
            context = int(self.rng.integers(0, max(3 * self.shape.block_size, 12) + 1))
            new = int(self.rng.choice([1, 1, 1, 2, 5, 9]))
            self.add(context, new, shared=bool(self.rng.random() < 0.5))
        return self

    def flat(self, tokens: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """query, key, value of the step's new tokens, padded to ``tokens`` rows of poison."""
        before = [request.context_len for request in self.requests]
        keys = [rows[at:] for rows, at in zip(self.keys, before, strict=True)]
        values = [
            rows[at:] for rows, at in zip(self.values, before, strict=True) if rows is not None
        ]
        return (
            self._padded(self.queries, tokens),
            self._padded(keys, tokens),
            self._padded(values, tokens) if values else None,
        )

    @property
    def caches(self) -> dict[str, Tensor | None]:
        """The caches and their scales, by the names that unified attention has for them."""
        names = ("key_cache", "value_cache", "key_scale", "value_scale")
        return {name: getattr(self, name) for name in names}

    def expected(
        self,
        *,
        value_projection: Tensor | None = None,
        **features: Any,
    ) -> tuple[Tensor, Tensor]:
        """out ``[tokens, H, D]`` and lse ``[tokens, H]`` of all requests; features: see `dense`."""
        stored, outs, sums = self.shape.stored, [], []
        for query, key, value in zip(self.queries, self.keys, self.values, strict=True):
            keys = store(key, stored)[2]
            latent = None if value_projection is None else value_projection.shape[1]
            values = keys[..., :latent] if value is None else store(value, stored)[2]
            out, lse = dense(query, keys, values, **features)
            outs.append(out)
            sums.append(lse)
        out = torch.cat(outs)
        if value_projection is not None:
            out = torch.einsum("thr,hrd->thd", out, value_projection.double())
        return out, torch.cat(sums)

    def _padded(self, rows: list[Tensor], tokens: int) -> Tensor:
        new = torch.cat(rows)
        poison = torch.full((tokens - len(new), *new.shape[1:]), self.poison, dtype=new.dtype)
        return torch.cat([new, poison])

    def _keys_and_values(self, tokens: int) -> tuple[Tensor, Tensor | None]:
        s = self.shape
        dims = (s.head_dim, s.value_dim or s.head_dim)
        key, value = (
            torch.randn(tokens, s.kv_heads, dim, generator=self.generator).to(s.dtype)
            for dim in dims
        )
        return key, None if s.latent else value

    def _poisoned_cache(self, dim: int) -> tuple[Tensor, Tensor | None]:
        s = self.shape
        rows = (s.num_blocks * s.block_size, s.kv_heads)
        if s.stored not in LARGEST:
            return torch.full((*rows, dim), self.poison, dtype=s.stored), None
        # A byte that is NaN in every fp8; where it is a number, its scale is poison.
        elements = torch.full((*rows, dim), 0x7F, dtype=torch.uint8).view(s.stored)
        return elements, torch.full(rows, self.poison)

    def _store(
        self, cache: Tensor | None, scale: Tensor | None, slots: list[int], rows: Tensor
    ) -> None:
        assert cache is not None
        stored, scales, _ = store(rows[: len(slots)], cache.dtype)
        cache[slots] = stored
        if scale is not None and scales is not None:
            scale[slots] = scales
