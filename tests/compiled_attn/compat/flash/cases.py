"""Random calls of `flash_attn_with_kvcache` and what they must give, in float64, row by row.

Everything that a call may not look at is poison.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from compiled_attn.testing.reference import flash_attn_with_kvcache

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class Case:
    """A call: `make` fills the tensors from the sizes."""

    seed: int = 0
    dtype: torch.dtype = torch.float32
    index_dtype: torch.dtype = torch.int32
    batch: int = 2
    queries: int = 1
    new: int | None = None
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    capacity: int = 24
    page_size: int | None = None
    lengths: list[int] | None = None
    leftpad: bool = False
    batch_idx: bool = False
    storage: str = "plain"
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: str | None = None
    rotary: int = 0
    rotary_rows: int | None = None
    interleaved: bool = True
    scale: float | None = None
    splits: int = 0
    args: dict[str, Any] = field(default_factory=dict)

    def make(self) -> Case:
        """Draws the tensors."""
        self.rng, self.gen = random.Random(self.seed), torch.Generator().manual_seed(self.seed)
        new = self.new or 0
        if self.lengths is None:
            most = self.capacity - (max(new, self.queries) if self.rotary else new)
            self.lengths = [self.rng.randint(0, most) for _ in range(self.batch)]
        if self.page_size:
            self.capacity = -(-self.capacity // self.page_size) * self.page_size
        totals = [length + new for length in self.lengths]
        self.pads = [self.rng.randint(0, t) if self.leftpad else 0 for t in totals]
        rows = self.batch + 3 if self.batch_idx else self.batch
        self.rows = (
            self.rng.sample(range(rows), self.batch) if self.batch_idx else list(range(rows))
        )
        self.table = self._table(rows, totals) if self.page_size else None
        pages = self.pages if self.page_size else rows
        self._allocate(pages, self.page_size or self.capacity)
        for b, length in enumerate(self.lengths):
            at = self.cell(b, torch.arange(min(self.pads[b], length), length))
            for cache in (self.k_cache, self.v_cache):
                cache[at] = self._draw(len(at[1]), self.kv_heads, self.dim)
        self.args = self._args()
        return self

    def cell(self, b: int, t: Tensor) -> tuple[Tensor, Tensor]:
        """Pages and slots of tokens t of batch row b."""
        if self.table is None or self.page_size is None:
            return torch.full_like(t, self.rows[b]), t
        return self.table[self.rows[b], t // self.page_size].long(), t % self.page_size

    def bits(self) -> Tensor:
        """A copy of the storage of both caches, poison and neighbours included, as integers."""
        base = torch.cat([each.reshape(-1) for each in self.bases])
        return base.view(_BITS[base.element_size()]).clone()

    def run(self, function: Any, **changes: Any) -> tuple[Tensor, Tensor]:
        """Out and lse; the caches are written."""
        out, lse = function(**{**self.args, "return_softmax_lse": True, **changes})
        return out, lse

    def restore(self, bits: Tensor) -> None:
        """Puts back what `bits` returned."""
        parts = bits.view(self.dtype).split([each.numel() for each in self.bases])
        for base, part in zip(self.bases, parts, strict=True):
            base.copy_(part.view_as(base))

    def expected(self, low: bool = False) -> tuple[Tensor, Tensor]:
        """Out and lse in float64; ``low``: by plain attention in the working dtype."""
        caches = {name: self.args[name].clone() for name in ("k_cache", "v_cache")}
        dtype = self.dtype if low else torch.float64
        return flash_attn_with_kvcache(**self.args | caches, dtype=dtype)

    def append_expected(self) -> None:
        """Writes the new tokens as the call should, row by row."""
        flash_attn_with_kvcache(**self.args)

    def _table(self, rows: int, totals: list[int]) -> Tensor:
        assert self.page_size is not None
        columns, size = self.capacity // self.page_size, self.page_size
        self.pages = rows * columns + 2
        free = self.rng.sample(range(self.pages), self.pages)
        junk = [-1, -7, self.pages, 10**6]
        table = [[self.rng.choice(junk) for _ in range(columns)] for _ in range(rows)]
        assert self.lengths is not None
        for b, total in enumerate(totals):
            for column in range(min(self.pads[b], self.lengths[b]) // size, -(-total // size)):
                table[self.rows[b]][column] = free.pop()
        return torch.tensor(table, dtype=self.index_dtype)

    def _allocate(self, pages: int, page_size: int) -> None:
        shape = (pages, page_size, self.kv_heads, self.dim)
        if self.storage == "plain":
            self.bases = [self._poison(shape), self._poison(shape)]
            self.k_cache, self.v_cache = self.bases
            return
        by_head = (2, pages, self.kv_heads, page_size, self.dim)
        base_shape, views = {
            "fused": ((pages, page_size, 2, *shape[2:]), lambda x: x.unbind(2)),
            "layers": ((2, 3, *shape), lambda x: x[:, 1]),
            "transposed": (by_head, lambda x: x.transpose(2, 3)),
            "interleaved heads": ((*shape[:3], 2 * self.dim), lambda x: x.split(self.dim, -1)),
        }[self.storage]
        self.bases = [self._poison(base_shape)]
        self.k_cache, self.v_cache = views(self.bases[0])

    def _poison(self, shape: tuple[int, ...]) -> Tensor:
        values = torch.tensor([math.nan, math.inf, -math.inf, 3e4])
        picks = torch.randint(0, 4, shape, generator=self.gen)
        return values[picks].to(self.dtype)

    def _draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.gen).to(self.dtype)

    def _indices(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=self.index_dtype)

    def _args(self) -> dict[str, Any]:
        assert self.lengths is not None
        args: dict[str, Any] = {
            "q": self._draw(self.batch, self.queries, self.heads, self.dim),
            "k_cache": self.k_cache,
            "v_cache": self.v_cache,
            "cache_seqlens": self._indices(self.lengths),
            "causal": self.causal,
            "window_size": self.window,
            "softcap": self.softcap,
            "rotary_interleaved": self.interleaved,
            "softmax_scale": self.scale,
            "num_splits": self.splits,
        }
        if self.new is not None:
            args["k"] = self._draw(self.batch, self.new, self.kv_heads, self.dim)
            args["v"] = self._draw(self.batch, self.new, self.kv_heads, self.dim)
        if self.rotary:
            rows = self.rotary_rows or self.capacity + 2
            angles = torch.rand(rows, self.rotary // 2, generator=self.gen) * 6.3
            args["rotary_cos"] = torch.cos(angles).to(self.dtype)
            args["rotary_sin"] = torch.sin(angles).to(self.dtype)
        if self.leftpad:
            args["cache_leftpad"] = self._indices(self.pads)
        if self.batch_idx:
            args["cache_batch_idx"] = self._indices(self.rows)
        if self.table is not None:
            args["block_table"] = self.table
        if self.alibi:
            shape = (self.heads,) if self.alibi == "heads" else (self.batch, self.heads)
            args["alibi_slopes"] = torch.rand(*shape, generator=self.gen)
        return args


def check(case: Case, function: Any, **changes: Any) -> tuple[Tensor, Tensor]:
    """Runs the call and holds everything that it did against the oracle; returns out and lse."""
    want, want_lse = case.expected()
    plain, plain_lse = case.expected(low=True)
    before = case.bits()
    out, lse = case.run(function, **changes)
    after = case.bits()
    factor = 5 if case.alibi else 3
    assert out.dtype == case.dtype and out.shape == want.shape
    assert (
        lse.dtype == torch.promote_types(case.dtype, torch.float32) and lse.shape == want_lse.shape
    )
    assert bool(torch.isfinite(out).all())
    assert torch.equal(lse == -math.inf, want_lse == -math.inf)
    blind = (want_lse == -math.inf).transpose(1, 2)
    assert bool((out[blind] == 0).all())
    assert_close(out, want, plain, factor)
    assert_close(
        lse.nan_to_num(neginf=0),
        want_lse.nan_to_num(neginf=0),
        plain_lse.nan_to_num(neginf=0),
        factor,
    )
    check_cache(case, before, after)
    return out, lse


def assert_close(got: Tensor, want: Tensor, plain: Tensor, factor: float) -> None:
    """The rule of FlashAttention's tests: a small multiple of the error in the working dtype."""
    if want.numel():
        error = (got.double() - want).abs().max().item()
        allowed = factor * (plain.double() - want).abs().max().item() + 1e-5
        assert error <= allowed, f"error {error} > {allowed}"


def check_cache(case: Case, before: Tensor, after: Tensor) -> None:
    """The new tokens are in place, v and unrotated k bit for bit, and nothing else has changed."""
    case.restore(before)
    case.append_expected()
    want = case.bits()
    case.restore(after)
    if case.rotary and case.new:
        wrong = (after != want).nonzero()[:, 0]
        got, right = after.view(case.dtype)[wrong].double(), want.view(case.dtype)[wrong].double()
        close = {torch.float16: 2e-3, torch.bfloat16: 2e-2}.get(case.dtype, 1e-6)
        assert torch.allclose(got, right, rtol=close, atol=close)
        changed = before != want
        assert torch.equal(after[~changed], before[~changed])
    else:
        assert torch.equal(after, want)
