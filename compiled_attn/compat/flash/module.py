"""`flash_attn_with_kvcache` as a module with fixed shapes, captured once per bucket."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compiled_attn.arguments import can_read
from compiled_attn.compat.flash.forward import forward
from compiled_attn.compat.flash.inputs import FlashCall
from compiled_attn.ops import KernelChoice

__all__ = ["FlashInputs", "FlashKVCacheAttention"]


class FlashInputs(NamedTuple):
    """The inputs of `FlashKVCacheAttention.forward`, in order.

    Shape:
        - q: ``[B, Sq, H, D]``
        - k, v: ``[B, Sn, Hk, D]`` or None
        - cache_seqlens: ints ``[B]``
        - block_table: ints ``[B, W]``, or None for a contiguous cache
        - cache_batch_idx, cache_leftpad: ints ``[B]`` or None
    """

    q: Tensor
    k: Tensor | None
    v: Tensor | None
    cache_seqlens: Tensor
    block_table: Tensor | None = None
    cache_batch_idx: Tensor | None = None
    cache_leftpad: Tensor | None = None

    @classmethod
    def padding(
        cls, k_cache: Tensor, num_heads: int, batch: int, columns: int | None, *, queries: int = 1
    ) -> FlashInputs:
        """Returns a step of padding to capture a bucket; it writes to the null page or row only.

        Args:
            k_cache: cache of the module, for head sizes, dtype and device.
            num_heads: H.
            batch: B of the bucket.
            columns: W of the bucket; None: a contiguous cache, addressed with cache_batch_idx.
            queries: Sq, and number of new tokens.
        """
        kv_heads, dim = k_cache.shape[2:]
        q, k, v = (
            k_cache.new_zeros(batch, queries, heads, dim)
            for heads in (num_heads, kv_heads, kv_heads)
        )
        lengths = torch.zeros(batch, dtype=torch.int32, device=k_cache.device)
        if columns is None:
            return cls(q, k, v, lengths, cache_batch_idx=torch.zeros_like(lengths))
        return cls(q, k, v, lengths, lengths.new_zeros(batch, columns))

    def padded(self, batch: int, columns: int | None = None) -> FlashInputs:
        """Pads the inputs to ``batch`` rows and ``columns`` of the block table.

        Added numbers are 0: length 0 in null page 0, or in null row 0 of a contiguous cache. A
        block table with ``cache_batch_idx`` becomes the table of the selected rows, ``[B, W]``,
        without index, as an added 0 would select a real row.

        Raises:
            ValueError: the bucket is too small; rows are added to a contiguous cache without
                cache_batch_idx; cache_batch_idx is out of range.
        """
        if self.block_table is not None and self.cache_batch_idx is not None:
            table = _rows_of(self.block_table, self.cache_batch_idx)
            own = self._replace(block_table=table, cache_batch_idx=None)
            return own.padded(batch, columns)
        rows = self.q.shape[0]
        width = 0 if self.block_table is None else self.block_table.shape[1]
        columns = width if columns is None else columns
        if rows > batch or width > columns:
            raise ValueError(
                f"expected a bucket of at least {rows} rows and {width} columns, got {batch} "
                f"and {columns}: pick a larger bucket"
            )
        if rows < batch and self.block_table is None and self.cache_batch_idx is None:
            raise ValueError(
                f"expected cache_batch_idx to pad a contiguous cache from {rows} to {batch} "
                "rows, got None: number the rows and leave row 0 to the padding"
            )
        fields = [None if each is None else _grown(each, batch) for each in self]
        inputs = FlashInputs(*fields)  # type: ignore[arg-type]
        if inputs.block_table is None:
            return inputs
        return inputs._replace(block_table=F.pad(inputs.block_table, (0, columns - width)))


class FlashKVCacheAttention(nn.Module):
    """One layer's attention over a cache that it holds as buffers, for `graphs.capture`.

    All inputs have the shapes of a bucket: B rows, Sq queries and Sn new tokens each, W columns. A
    smaller batch is padded with rows of length 0 in the null page or row: page 0 of a paged cache
    (a row of ``block_table`` that is all 0), row 0 of a contiguous cache addressed with
    ``cache_batch_idx``. Nothing real may be stored there. Padded rows write nowhere else, return
    zeros and log-sum-exp -inf, and may hold NaN.

    Args:
        k_cache, v_cache: ``[NP, P, Hk, D]`` pages or ``[Bc, Sc, Hk, D]`` rows; may be views of a
            larger buffer.
        causal: like the other options in `flash_attn_with_kvcache`, but on by default.

    Shape:
        - forward(q ``[B, Sq, H, D]``, k, v ``[B, Sn, Hk, D]`` or None, cache_seqlens ``[B]``,
          block_table ``[B, W]`` or None, cache_batch_idx ``[B]`` or None, cache_leftpad ``[B]`` or
          None) -> ``[B, Sq, H, D]``, and with ``return_softmax_lse`` also ``[B, H, Sq]``.
          `FlashInputs` holds the inputs in this order and pads them.

    Raises (by forward):
        FlashArgumentError, TypeError: as `flash_attn_with_kvcache`.
    """

    k_cache: Tensor
    v_cache: Tensor
    rotary_cos: Tensor | None
    rotary_sin: Tensor | None
    alibi_slopes: Tensor | None

    def __init__(
        self,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        rotary_cos: Tensor | None = None,
        rotary_sin: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = True,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        rotary_interleaved: bool = True,
        alibi_slopes: Tensor | None = None,
        num_splits: int = 0,
        return_softmax_lse: bool = False,
        kernel: KernelChoice = "auto",
    ) -> None:
        super().__init__()
        self.register_buffer("k_cache", k_cache, persistent=False)
        self.register_buffer("v_cache", v_cache, persistent=False)
        self.register_buffer("rotary_cos", rotary_cos, persistent=False)
        self.register_buffer("rotary_sin", rotary_sin, persistent=False)
        self.register_buffer("alibi_slopes", alibi_slopes, persistent=False)
        self.softmax_scale = softmax_scale
        self.causal = causal
        self.window_size = window_size
        self.softcap = softcap
        self.rotary_interleaved = rotary_interleaved
        self.num_splits = num_splits
        self.return_softmax_lse = return_softmax_lse
        self.kernel = kernel

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        cache_seqlens: Tensor,
        block_table: Tensor | None = None,
        cache_batch_idx: Tensor | None = None,
        cache_leftpad: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Appends and attends, as `flash_attn_with_kvcache`."""
        rotates = k is not None
        call = FlashCall(
            q,
            self.k_cache,
            self.v_cache,
            k,
            v,
            self.rotary_cos if rotates else None,
            self.rotary_sin if rotates else None,
            cache_seqlens,
            cache_batch_idx,
            cache_leftpad,
            block_table,
            self.softmax_scale,
            self.causal,
            self.window_size,
            self.softcap,
            self.rotary_interleaved,
            self.alibi_slopes,
            self.num_splits,
            kernel=self.kernel,
        )
        out, lse = forward(call, null_page=True)
        return (out, lse) if self.return_softmax_lse else out

    def extra_repr(self) -> str:
        """The cache's shape and dtype, for ``repr``."""
        return f"cache={list(self.k_cache.shape)}, dtype={self.k_cache.dtype}, causal={self.causal}"


def _rows_of(block_table: Tensor, rows: Tensor) -> Tensor:
    chosen = rows.tolist() if can_read(rows) else []
    if not all(0 <= row < len(block_table) for row in chosen):
        raise ValueError(
            f"expected cache_batch_idx in 0 .. {len(block_table) - 1}, got {chosen}: "
            "name rows of block_table that exist"
        )
    return block_table[rows.long()]


def _grown(tensor: Tensor, rows: int) -> Tensor:
    return torch.cat((tensor, tensor.new_zeros(rows - tensor.shape[0], *tensor.shape[1:])))
