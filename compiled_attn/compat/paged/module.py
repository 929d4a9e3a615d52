"""Paged attention of one layer as a module for capture at fixed shapes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compiled_attn.compat.paged.decode import attend_natively, attend_pages, reduce_partitions
from compiled_attn.compat.paged.inputs import DecodeCall, Scale
from compiled_attn.compat.paged.layouts import Layout, expect
from compiled_attn.compat.paged.reshape_and_cache import reshape_and_cache
from compiled_attn.compat.paged.validation import check
from compiled_attn.ops import KernelChoice, chooses_native

__all__ = ["PagedAttention", "PagedInputs"]


class PagedInputs(NamedTuple):
    """The inputs of `PagedAttention.forward`, in order.

    Shape:
        - query: ``[S, H, D]``
        - block_tables: ints ``[S, W]``
        - seq_lens: ints ``[S]``
        - key, value: ``[S, Hk, D]`` or None
        - slot_mapping: ints ``[S]`` or None
    """

    query: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    key: Tensor | None = None
    value: Tensor | None = None
    slot_mapping: Tensor | None = None

    def padded(self, num_seqs: int, width: int) -> PagedInputs:
        """Pads the inputs to ``num_seqs`` rows and ``width`` columns of the tables.

        Added rows have no tokens and a negative slot: they return zeros and write nowhere.

        Raises:
            PagedArgumentError: the bucket is too small.
        """
        rows, columns = self.block_tables.shape
        more, wider = num_seqs - rows, width - columns
        fits = more >= 0 and wider >= 0
        need = f"a bucket of at least {rows} rows and {columns} columns"
        expect(fits, need, (num_seqs, width), "pick a larger bucket")
        fields = [None if each is None else _grown(each, more) for each in self]
        inputs = PagedInputs(*fields)  # type: ignore[arg-type]
        slots = self.slot_mapping
        return inputs._replace(
            block_tables=F.pad(inputs.block_tables, (0, wider)),
            slot_mapping=None if slots is None else F.pad(slots, (0, more), value=-1),
        )


def _grown(tensor: Tensor, rows: int) -> Tensor:
    return F.pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, rows))


class PagedAttention(nn.Module):
    """Decode attention of one layer over paged caches, which it holds as buffers.

    A step is padded to a bucket: S sequences and W columns of the block tables. A padded row has
    ``seq_lens`` 0, a negative slot, and anything in its query and table row; it returns zeros.

    Args:
        key_cache, value_cache: the caches, in any layout; `empty_caches` makes a pair.
        num_kv_heads: Hk.
        block_size: BS.
        scale: factor of the scores.
        layout: of both caches, see `compiled_attn.compat.paged.Layout`.
        alibi_slopes: floats ``[H]`` or None.
        kv_cache_dtype, k_scale, v_scale: as in `paged_attention_v1`.
        partition: tokens in a partition of the context, as in `paged_attention_v2`; None: no split.
            The native kernel chooses its own split.
        kernel: as in `paged_attention_v1`.

    Shape:
        - query: ``[S, H, D]``
        - block_tables: ``[S, W]`` ints
        - seq_lens: ``[S]`` ints, the tokens of this step included
        - key, value: ``[S, Hk, D]`` or None, the tokens of this step, written to the caches first
        - slot_mapping: ``[S]`` ints, where to; negative for padding. Given if and only if key and
            value are
        - output: ``[S, H, D]`` in the query's dtype

    Raises:
        PagedArgumentError, TypeError: as `paged_attention_v1` and `reshape_and_cache`; the caches
            are unchanged.
    """

    key_cache: Tensor
    value_cache: Tensor
    alibi_slopes: Tensor | None
    k_scale: Scale
    v_scale: Scale

    def __init__(
        self,
        key_cache: Tensor,
        value_cache: Tensor,
        num_kv_heads: int,
        block_size: int,
        scale: float,
        *,
        layout: Layout = "packed",
        alibi_slopes: Tensor | None = None,
        kv_cache_dtype: str = "auto",
        k_scale: Scale = 1.0,
        v_scale: Scale = 1.0,
        partition: int | None = None,
        kernel: KernelChoice = "auto",
    ) -> None:
        super().__init__()
        legal = partition is None or partition >= 1
        expect(legal, "a partition of at least 1 token, or None", partition, "try 512")
        self.register_buffer("key_cache", key_cache, persistent=False)
        self.register_buffer("value_cache", value_cache, persistent=False)
        self.register_buffer("alibi_slopes", alibi_slopes, persistent=False)
        self.num_kv_heads, self.block_size, self.scale = num_kv_heads, block_size, scale
        self.layout, self.kv_cache_dtype = layout, kv_cache_dtype
        self.partition = partition
        self.kernel = kernel
        for name, given in (("k_scale", k_scale), ("v_scale", v_scale)):
            if isinstance(given, Tensor):
                self.register_buffer(name, given, persistent=False)
            else:
                setattr(self, name, given)

    def forward(
        self,
        query: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        slot_mapping: Tensor | None = None,
    ) -> Tensor:
        """Writes the tokens of the step, if any, then attends; shapes in the class docstring."""
        call = DecodeCall(
            query, self.key_cache, self.value_cache, self.num_kv_heads, self.scale, block_tables,
            seq_lens, self.block_size, block_tables.shape[-1] * self.block_size,
            self.alibi_slopes, self.kv_cache_dtype, self.k_scale, self.v_scale, self.layout,
        )  # fmt: skip
        written = {"key_cache": self.key_cache, "value_cache": self.value_cache}
        lengths = check(call, **(written if key is not None else {}))
        native = chooses_native(self.kernel, call.traits())
        if key is not None and value is not None and slot_mapping is not None:
            self._write(query, key, value, slot_mapping)
        else:
            given = [each is not None for each in (key, value, slot_mapping)]
            expected = "key, value and slot_mapping together, or none of them"
            expect(not any(given), expected, given, "pass all three")
        with torch.no_grad():
            if native:
                return attend_natively(call)
            return reduce_partitions(attend_pages(call, lengths, self.partition)).to(query.dtype)

    def extra_repr(self) -> str:
        """Sizes and options, for ``print``."""
        return (
            f"kv_heads={self.num_kv_heads}, block_size={self.block_size}, layout={self.layout}, "
            f"kv_cache_dtype={self.kv_cache_dtype}, partition={self.partition}, "
            f"key_cache={list(self.key_cache.shape)}"
        )

    def _write(self, query: Tensor, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        shape = (query.shape[0], self.num_kv_heads, query.shape[2])
        expect.tensor("key", key, "(S, Hk, D)", shape, (query.dtype,), query)
        expect.tensor("slot_mapping", slot_mapping, "(S,)", shape[:1])
        reshape_and_cache(
            key, value, self.key_cache, self.value_cache, slot_mapping, self.kv_cache_dtype,
            self.k_scale, self.v_scale, layout=self.layout,
        )  # fmt: skip
