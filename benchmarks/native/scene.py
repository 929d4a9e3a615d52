"""Paged steps to measure on: their blocks lie anywhere in a pool larger than the caches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compiled_attn.cache.quantisation import QUANTISED, quantise

HEADS, KV_HEADS, DIM = 32, 8, 128


@dataclass(frozen=True)
class Step:
    """The arguments of the op `paged_attention`, for one step."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    scales: dict[str, Tensor]

    @property
    def arguments(self) -> tuple[object, ...]:
        """Positional arguments of the op."""
        return (
            self.query, self.key_cache, self.value_cache, self.block_table, self.seq_lens,
            self.query_start_loc, DIM**-0.5,
        )  # fmt: skip

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that the step reads."""
        tokens = int(self.seq_lens.sum())
        return 2 * tokens * KV_HEADS * DIM * self.key_cache.element_size()

    @property
    def flops(self) -> float:
        """Operations of causal attention: two products of 2 operations a pair and element."""
        queries = self.query_start_loc.diff().double()
        pairs = queries * self.seq_lens.double() - queries * (queries - 1) / 2
        return float(4 * HEADS * DIM * pairs.sum())


class Scene:
    """A pool of blocks, and steps over it.

    Args:
        dtype: of the caches; queries are of it too, or bfloat16 where it is quantised.
        block_size: tokens of a block.
        pool_bytes: of keys, and as many of values.
        allocate: makes a tensor of the pool, on huge pages or not.
        scaled: whether each token of a head has a scale, by its largest element; else all
            scales of floats of 8 bits are 1, as engines have them by default; numbers are normally
            distributed, so that some codes are subnormal.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        block_size: int,
        pool_bytes: int = 2**29,
        allocate=torch.empty,
        scaled: bool = True,
    ) -> None:
        self.dtype, self.block_size = dtype, block_size
        self.query_dtype = torch.bfloat16 if dtype in QUANTISED else dtype
        blocks = pool_bytes // (block_size * KV_HEADS * DIM * dtype.itemsize)
        shape = (blocks, block_size, KV_HEADS, DIM)
        self.key_cache, self.value_cache = (allocate(shape, dtype=dtype) for _ in range(2))
        self.scales: dict[str, Tensor] = {}
        row = torch.randn(block_size, KV_HEADS, DIM)
        for name, cache in (("key_scale", self.key_cache), ("value_scale", self.value_cache)):
            if dtype in QUANTISED:
                codes, scale = quantise(row, dtype)
                if not scaled and dtype.is_floating_point:
                    codes, scale = row.to(dtype), torch.ones_like(scale)
                cache.view(torch.uint8).copy_(codes.view(torch.uint8).expand(shape))
                self.scales[name] = scale.expand(shape[:3]).contiguous()
            else:
                cache.copy_(row.expand(shape))

    def steps(self, queries: list[int], lengths: list[int], count: int) -> list[Step]:
        """``count`` steps of the same shape whose blocks differ, so that each finds them cold."""
        width = -(-max(lengths) // self.block_size)
        used = [-(-length // self.block_size) for length in lengths]
        steps = []
        for _ in range(count):
            ids = torch.randperm(len(self.key_cache) - 1, dtype=torch.int32)[: sum(used)] + 1
            table = torch.zeros(len(lengths), width, dtype=torch.int32)
            for row, part in zip(table, ids.split(used), strict=True):
                row[: len(part)] = part
            starts = torch.tensor([0, *torch.tensor(queries).cumsum(0)], dtype=torch.int32)
            query = torch.randn(sum(queries), HEADS, DIM).to(self.query_dtype)
            seq_lens = torch.tensor(lengths, dtype=torch.int32)
            steps.append(
                Step(query, self.key_cache, self.value_cache, table, seq_lens, starts, self.scales)
            )
        return steps
