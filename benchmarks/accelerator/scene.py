"""Paged steps on a device: blocks anywhere in a pool, a fresh choice of them for each round."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compiled_attn.cache.quantisation import quantise


@dataclass(frozen=True)
class Sizes:
    """What a scene is made of.

    Args:
        heads, kv_heads, dim: of the attention.
        block_size: tokens of a block.
        dtype: of queries, keys and values.
        cache: of quantised keys and values, else None.
    """

    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    cache: torch.dtype | None = None


@dataclass(frozen=True)
class Step:
    """The arguments of the op `paged_attention` of requests that are all alike, on the device.

    Args:
        queries, length: of each request, its keys before and with this step.
    """

    sizes: Sizes
    queries: int
    length: int
    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None

    @property
    def requests(self) -> int:
        """How many there are."""
        return len(self.seq_lens)

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys, values and their scales that are read, each once."""
        element = (self.sizes.cache or self.sizes.dtype).itemsize
        of_head = self.sizes.dim * element + (4 if self.sizes.cache else 0)
        of_token = 2 * self.sizes.kv_heads * of_head
        return self.requests * self.length * of_token

    @property
    def flops(self) -> float:
        """Operations of causal attention: two products of 2 operations a pair and element."""
        pairs = self.queries * self.length - self.queries * (self.queries - 1) / 2
        return 4.0 * self.sizes.heads * self.sizes.dim * pairs * self.requests


def steps(
    sizes: Sizes, requests: int, queries: int, length: int, device: torch.device, count: int
) -> list[Step]:
    """``count`` steps over one pool of twice the blocks that each reads."""
    width = -(-length // sizes.block_size)
    blocks = 2 * requests * width + 1
    shape = (blocks, sizes.block_size, sizes.kv_heads, sizes.dim)
    (key, key_scale), (value, value_scale) = (_cache(shape, sizes, device) for _ in range(2))
    starts = (torch.arange(requests + 1, dtype=torch.int32) * queries).to(device)
    lengths = torch.full((requests,), length, dtype=torch.int32).to(device)
    made = []
    for _ in range(count):
        ids = torch.randperm(blocks - 1, dtype=torch.int32)[: requests * width] + 1
        query = torch.randn(requests * queries, sizes.heads, sizes.dim).to(sizes.dtype)
        table = ids.view(requests, width).to(device)
        made.append(
            Step(sizes, queries, length, query.to(device), key, value, table, lengths, starts,
                 key_scale, value_scale)
        )  # fmt: skip
    return made


def _cache(
    shape: tuple[int, ...], sizes: Sizes, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    rows = torch.randn(shape, dtype=sizes.dtype, device=device)
    return quantise(rows, sizes.cache) if sizes.cache else (rows, None)
