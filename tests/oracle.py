"""What the attention tests compare with: dense float64 attention, request by request.

A `Scene` is a step of random requests over a paged cache whose every unused slot is poisoned. It is
written
independently of the library: positions one by one, no blocks, no buckets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from compiled_attn import Request


@dataclass
class Shape:
    """Sizes of a scene."""

    block_size: int = 4
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 16
    num_blocks: int = 64
    dtype: torch.dtype = torch.float32


def dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention of the last rows: q ``[n, H, D]``, k, v ``[L, Hk, D]`` -> out, lse."""
    rows, heads, dim = query.shape
    length, kv_heads, _ = key.shape
    out = torch.zeros(rows, heads, dim, dtype=torch.float64)
    lse = torch.zeros(rows, heads, dtype=torch.float64)
    for row in range(rows):
        position = length - rows + row
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(heads):
            kv = head // (heads // kv_heads)
            keys, values = key[first : position + 1, kv].double(), value[first : position + 1, kv]
            scores = keys @ query[row, head].double() * dim**-0.5
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat([scores, sinks[head : head + 1].double()])
            lse[row, head] = torch.logsumexp(scores, 0)
            weights = torch.softmax(scores, 0)[: len(keys)]
            out[row, head] = weights @ values.double()
    return out, lse


class Scene:
    """Random requests of one step: decodes, prompt chunks, drafts, shared prefixes."""

    def __init__(self, seed: int, shape: Shape | None = None, poison: float = math.nan) -> None:
        self.shape = s = shape or Shape()
        self.rng = np.random.default_rng(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.poison = poison
        slots = (s.num_blocks * s.block_size, s.kv_heads, s.head_dim)
        self.key_cache = torch.full(slots, poison, dtype=s.dtype)
        self.value_cache = torch.full(slots, poison, dtype=s.dtype)
        # Any order of block ids, with holes.
        self.free = [int(block) for block in self.rng.permutation(np.arange(1, s.num_blocks))]
        self.requests: list[Request] = []
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.queries: list[Tensor] = []
        self.prefix_blocks: list[int] = []
        self.prefix: tuple[Tensor, Tensor] | None = None

    def share_prefix(self, blocks: int) -> Scene:
        """Later requests may start with this prefix of full blocks."""
        self.prefix_blocks = [self.free.pop() for _ in range(blocks)]
        tokens = blocks * self.shape.block_size
        self.prefix = (self._kv(tokens), self._kv(tokens))
        return self

    def add(self, context: int, new: int, *, shared: bool = False, logits: int = 1) -> Scene:
        """A request of ``context`` cached and ``new`` new tokens; ``shared``: after the prefix."""
        s, blocks = self.shape, list(self.prefix_blocks) if shared else []
        context += len(blocks) * s.block_size
        key, value = self._kv(context + new), self._kv(context + new)
        if shared and self.prefix:
            key[: len(self.prefix[0])], value[: len(self.prefix[1])] = self.prefix
        while len(blocks) * s.block_size < context + new:
            blocks.append(self.free.pop())
        for position in range(context):
            slot = blocks[position // s.block_size] * s.block_size + position % s.block_size
            self.key_cache[slot], self.value_cache[slot] = key[position], value[position]
        self.keys.append(key)
        self.values.append(value)
        heads = s.kv_heads * s.group
        self.queries.append(
            torch.randn(new, heads, s.head_dim, generator=self.generator).to(s.dtype)
        )
        tokens = self.rng.integers(0, 100, new)
        self.requests.append(Request(tokens, context, np.array(blocks), logits))
        return self

    def random(self, count: int = 5) -> Scene:
        """``count`` random requests, some behind a common prefix."""
        self.share_prefix(int(self.rng.integers(1, 3)))
        for _ in range(count):
            context = int(self.rng.integers(0, 3 * self.shape.block_size + 1))
            new = int(self.rng.choice([1, 1, 1, 2, 5, 9]))
            self.add(context, new, shared=bool(self.rng.random() < 0.5))
        return self

    def flat(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """query, key, value of the step's new tokens, padded to ``tokens`` rows of poison."""
        new_keys = [k[r.context_len :] for k, r in zip(self.keys, self.requests, strict=True)]
        new_values = [v[r.context_len :] for v, r in zip(self.values, self.requests, strict=True)]
        return tuple(  # type: ignore[return-value]
            self._padded(torch.cat(rows), tokens) for rows in (self.queries, new_keys, new_values)
        )

    def expected(
        self,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """out ``[tokens, H, D]`` and lse ``[tokens, H]`` of all requests, float64."""
        each = [
            dense(q, k, v, window=window, softcap=softcap, sinks=sinks)
            for q, k, v in zip(self.queries, self.keys, self.values, strict=True)
        ]
        return torch.cat([out for out, _ in each]), torch.cat([lse for _, lse in each])

    def _padded(self, rows: Tensor, tokens: int) -> Tensor:
        poison = torch.full((tokens - len(rows), *rows.shape[1:]), self.poison, dtype=rows.dtype)
        return torch.cat([rows, poison])

    def _kv(self, tokens: int) -> Tensor:
        s = self.shape
        return torch.randn(tokens, s.kv_heads, s.head_dim, generator=self.generator).to(s.dtype)
