"""Random paged decode steps and what attention must give, in float64, row by row.

Independent of the library: cells of the caches are addressed by the formulas of the layouts, one
token at a time. Everything that attention may not look at is poison.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.oracle import attend

CODES = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def caches(
    layout: str, blocks: int, size: int, heads: int, dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Zeroed caches with the shapes of the specification."""
    x = 16 // dtype.itemsize
    shapes = {
        "packed": ((blocks, heads, dim // x, size, x), (blocks, heads, dim, size)),
        "flat": ((blocks * size, heads, dim),) * 2,
        "NHD": ((blocks, size, heads, dim),) * 2,
        "HND": ((blocks, heads, size, dim),) * 2,
    }
    key, value = (torch.zeros(shape, dtype=dtype) for shape in shapes[layout])
    return key, value


def put(
    key: Tensor, value: Tensor, layout: str, block: int, slot: int, k: Tensor, v: Tensor
) -> None:
    """Writes one token ``[Hk, D]`` by the formulas of the layouts."""
    if layout == "packed":
        key[block, :, :, slot], value[block, :, :, slot] = k.unflatten(1, (-1, key.shape[-1])), v
    elif layout == "HND":
        key[block, :, slot], value[block, :, slot] = k, v
    else:
        at: Any = (block, slot) if layout == "NHD" else slot
        key[at], value[at] = k, v


@dataclass
class Step:
    """One decode step; `make` draws the tensors."""

    seed: int = 0
    lengths: tuple[int, ...] = (5, 0, 17)
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    block_size: int = 4
    layout: str = "packed"
    dtype: torch.dtype = torch.float32
    index_dtype: torch.dtype = torch.int32
    kv_cache_dtype: str = "auto"
    alibi: bool = False
    extra_width: int = 1
    extra_blocks: int = 3
    poison: float = math.nan
    k_scale: Any = 1.0
    v_scale: Any = 1.0
    spread: float = 1.0

    def make(self) -> Step:
        self.generator = torch.Generator().manual_seed(self.seed)
        rng = random.Random(self.seed)
        need = [-(-n // self.block_size) for n in self.lengths]
        self.blocks = sum(need) + self.extra_blocks
        ids = rng.sample(range(self.blocks), sum(need))
        self.tables = [[ids.pop() for _ in range(count)] for count in need]
        self.keys = [self._random(n, self.kv_heads) for n in self.lengths]
        self.values = [self._random(n, self.kv_heads) for n in self.lengths]
        self.slopes = torch.rand(self.heads, generator=self.generator) if self.alibi else None
        self.scale = self.dim**-0.5
        self._fill_caches()
        self._fill_tables(max(need, default=0) + self.extra_width)
        return self

    def _random(self, rows: int, heads: int) -> Tensor:
        rows_of_heads = torch.randn(rows, heads, self.dim, generator=self.generator) * self.spread
        return rows_of_heads.to(self.dtype)

    def _fill_caches(self) -> None:
        sizes = (self.blocks, self.block_size, self.kv_heads, self.dim)
        stored = self.dtype if self.kv_cache_dtype == "auto" else torch.int8
        stored = CODES.get(self.kv_cache_dtype, stored)
        self.key_cache, self.value_cache = caches(self.layout, *sizes, stored)
        if stored.is_floating_point:
            self.key_cache.fill_(self.poison)
            self.value_cache.fill_(self.poison)
        for blocks, keys, values in zip(self.tables, self.keys, self.values, strict=True):
            for t in range(len(keys)):
                block, slot = blocks[t // self.block_size], t % self.block_size
                if self.layout == "flat":
                    slot += block * self.block_size
                k, v = self._encoded(keys[t], self.k_scale), self._encoded(values[t], self.v_scale)
                put(self.key_cache, self.value_cache, self.layout, block, slot, k, v)
                keys[t], values[t] = self._real(k, self.k_scale), self._real(v, self.v_scale)

    def _encoded(self, token: Tensor, scale: Any) -> Tensor:
        if self.kv_cache_dtype == "auto":
            return token
        codes = token.float() / _column(scale)
        if self.kv_cache_dtype == "int8":
            return codes.round().clamp(-127, 127).to(torch.int8)
        return codes.to(CODES[self.kv_cache_dtype])

    def _real(self, codes: Tensor, scale: Any) -> Tensor:
        return codes if self.kv_cache_dtype == "auto" else codes.float() * _column(scale)

    def _fill_tables(self, width: int) -> None:
        junk = [-1, -(2**31), 2**31 - 1, self.blocks, 0]
        rng, rows = random.Random(self.seed), len(self.lengths)
        table = [[rng.choice(junk) for _ in range(width)] for _ in range(rows)]
        for row, blocks in zip(table, self.tables, strict=True):
            row[: len(blocks)] = blocks
        self.block_tables = torch.tensor(table, dtype=self.index_dtype).view(rows, width)
        self.seq_lens = torch.tensor(self.lengths, dtype=self.index_dtype)
        fused = torch.full((rows, self.heads + 3, self.dim), self.poison, dtype=self.dtype)
        self.query = fused[:, 2 : 2 + self.heads]  # a strided slice, as of a fused qkv
        for row, length in enumerate(self.lengths):
            if length:
                self.query[row] = self._random(self.heads, 1).squeeze(1)

    @property
    def max_seq_len(self) -> int:
        """All that the table has room for."""
        return self.block_tables.shape[1] * self.block_size

    def args(self, **changes: Any) -> tuple[Any, ...]:
        """The positional arguments from ``query`` on."""
        named = {
            "query": self.query, "key_cache": self.key_cache, "value_cache": self.value_cache,
            "num_kv_heads": self.kv_heads, "scale": self.scale, "block_tables": self.block_tables,
            "seq_lens": self.seq_lens, "block_size": self.block_size,
            "max_seq_len": self.max_seq_len, "alibi_slopes": self.slopes,
            "kv_cache_dtype": self.kv_cache_dtype, "k_scale": self.k_scale, "v_scale": self.v_scale,
        }  # fmt: skip
        return tuple((named | changes).values())

    def partials(self, partition: int) -> tuple[Tensor, Tensor, Tensor]:
        """Buffers for exp_sum, max_logits and tmp_out, full of poison."""
        shape = (len(self.lengths), self.heads, -(-self.max_seq_len // partition))
        sums = torch.full(shape, self.poison)
        tmp = torch.full((*shape, self.dim), self.poison, dtype=self.dtype)
        return sums, sums.clone(), tmp

    def scores(self, row: int) -> Tensor:
        """Scores of all tokens of a row by all heads ``[H, n]``, float64."""
        keys = self.keys[row].double().repeat_interleave(self.heads // self.kv_heads, 1)
        scores = torch.einsum("hd,nhd->hn", self.query[row].double(), keys)
        return self.scale * scores + self._alibi(row).flatten(0, -2)

    def _alibi(self, row: int) -> Tensor:
        n = self.lengths[row]
        bias = torch.zeros(1, n, dtype=torch.float64)
        if self.slopes is None:
            return bias
        return bias + self.slopes.double()[:, None, None] * (torch.arange(n) - n + 1)

    def expected(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """Attention in float64; in the step's own dtype for the error that it makes anyway."""
        out = torch.zeros(self.query.shape, dtype=torch.float64)
        for row, length in enumerate(self.lengths):
            if length:
                tokens = self.query[row, None], self.keys[row], self.values[row]
                bias, options = self._alibi(row), {"scale": self.scale, "dtype": dtype}
                out[row] = attend(*tokens, bias, **options)[0][0]  # type: ignore[arg-type]
        return out

    def assert_exact(self, out: Tensor) -> None:
        """Raises unless the error is at most twice that of naive attention in the same dtype."""
        expected = self.expected()
        assert not out.isnan().any(), "a value that may not be looked at got out"
        error = (out.double() - expected).abs().max().item() if out.numel() else 0.0
        allowed = (self.expected(self.dtype) - expected).abs().max().item() if out.numel() else 0.0
        assert error <= 2 * allowed + 1e-5, f"error {error:.2e}, naive {allowed:.2e}"
        for row, length in enumerate(self.lengths):
            assert length or not out[row].any(), "a row without tokens must be zero"


def _column(scale: Any) -> Any:
    return scale.reshape(-1, 1) if isinstance(scale, Tensor) else scale
