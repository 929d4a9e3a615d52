"""The sanitizer of a cache whose caller describes each step: `PagedKVCache`, or own tensors."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compiled_attn.attention.metadata import UnifiedMetadata
from compiled_attn.attention.step_shadow import step_shadow
from compiled_attn.cache.kv_cache import PagedKVCache
from compiled_attn.cache.slot_shadow import LayerShadow, SlotShadow, check_layer
from compiled_attn.testing.sanitizer.ledger import Ledger, StepTokens, poison

__all__ = ["CacheWatch", "TensorWatch"]

Op = TypeVar("Op", bound=Callable[..., Any])

_CACHES = ("key_cache", "k_cache", "kv_cache", "key_cache_", "k_cache_", "cache", "key")
_SLOTS = ("slot_mapping", "slots")
_TABLES = ("block_tables", "block_table", "page_table")
_LENGTHS = ("seq_lens", "cache_seqlens", "context_lens", "seqused_k", "cache_lens")


class CacheWatch:
    """Checks the calls over a `PagedKVCache`; the caller describes each step.

    Args:
        cache: a cache without a shadow.
        max_requests, max_tokens: maximum per step, padding included.
        max_blocks: maximum blocks of a request; None: all blocks.
    """

    def __init__(
        self, cache: PagedKVCache, *, max_requests: int, max_tokens: int, max_blocks: int | None
    ) -> None:
        width = min(cache.num_blocks - 1, max_blocks or cache.num_blocks - 1)
        device = cache.key(0).device
        shadow = SlotShadow(
            cache.num_layers, cache.block_size, max_requests, max_tokens, width, device
        )
        cache.set_shadow(shadow)
        named = dict(cache.named_buffers(recurse=False))
        tags = [each for name, each in named.items() if name.startswith("tag_")]
        buffers = [each for name, each in named.items() if not name.startswith("tag_")]
        self._set_up(shadow, tags, buffers, cache.num_blocks)

    def _set_up(
        self,
        shadow: SlotShadow,
        tags: list[Tensor],
        buffers: list[Tensor],
        num_blocks: int,
        calls: int = 1,
    ) -> None:
        self._shadow, self._tags, self._buffers, self._num_blocks = (
            shadow,
            tags,
            buffers,
            num_blocks,
        )
        self._free = np.ones(num_blocks, np.bool_)
        self._ledger = Ledger(
            shadow, lambda: self._tags, num_blocks, lambda block: bool(self._free[block]), calls
        )

    def step(self, parts: Sequence[StepTokens]) -> None:
        """Describes the step that the following calls compute; checks the calls before.

        Args:
            parts: the requests, in the order of their rows in the batch.

        Raises:
            CorruptCache: an earlier call read or wrote a wrong slot, or two tokens have one slot.
            ValueError: more requests than ``max_requests``, too few blocks, or the null block 0.
        """
        self.check(is_over=True)
        for part in parts:
            if 0 in part.blocks:
                raise ValueError(
                    f"request {part.request!r}: expected blocks from 1 on, got "
                    f"{[*part.blocks]}: block 0 takes the writes of padding, so give it to nobody"
                )
        for part in parts:
            self._free[np.asarray(part.blocks, np.int64)] = False
        self._ledger.step += 1
        self._ledger.begin(parts)

    def check(self, *, is_over: bool = False) -> None:
        """Raises CorruptCache if a call since the last `step` read or wrote a wrong slot.

        Args:
            is_over: all calls of the step were made; so each layer that wrapped kernels wrote must
                have been read, unless none was.
        """
        if self._ledger.step:
            self._ledger.check(written=is_over)

    def free(self, blocks: Sequence[int] | NDArray[np.integer[Any]]) -> None:
        """Marks blocks as free: fills them with NaN, and makes reading them an error."""
        at = np.asarray(blocks, np.int64)
        for tensor in self._buffers:
            poison(tensor, at, self._num_blocks)
        self._ledger.freed(at, self._ledger.step)
        self._free[at] = True


class TensorWatch(CacheWatch):
    """Checks kernels over the caller's own tensors, in calls through `wrap`.

    Args:
        layers: the cache tensors of each layer (key and value, or one tensor with both); axis 0 is
            blocks, or the slots of all blocks.
        block_size: slots in a block.
        num_blocks: number of blocks; None: size of axis 0, of tensors with at least 4 axes.
        max_requests, max_tokens, max_blocks: see `CacheWatch`.
    """

    def __init__(
        self,
        layers: Sequence[Tensor | Sequence[Tensor]],
        *,
        block_size: int,
        num_blocks: int | None,
        max_requests: int,
        max_tokens: int,
        max_blocks: int | None,
    ) -> None:
        groups = [(each,) if isinstance(each, Tensor) else tuple(each) for each in layers]
        buffers = [tensor for group in groups for tensor in group]
        _refuse_overlap(buffers)
        for tensor in buffers:
            _check_blocks(tensor, block_size, num_blocks)
        first = buffers[0]
        count = first.shape[0] if num_blocks is None else num_blocks
        width = min(count - 1, max_blocks or count - 1)
        self._layer_of = {
            tensor.data_ptr(): n for n, group in enumerate(groups) for tensor in group
        }
        # Writes and reads are separate calls, each with an error of its own.
        shadow = SlotShadow(
            2 * len(groups), block_size, max_requests, max_tokens, width, first.device
        )
        shape = (count, block_size)
        tags = [torch.zeros(shape, dtype=torch.int32, device=first.device) for _ in groups]
        self._set_up(shadow, tags, buffers, count, calls=2)

    def wrap(self, op: Op, *, padding_slot: int | None = -1, window: int | None = None) -> Op:
        """Returns a function that checks the arguments of a kernel, then calls it.

        Arguments are found by name: the cache (``key_cache``, ``k_cache``, ``kv_cache``), the
        slots that are written (``slot_mapping``, ``slots``), and what is read (``block_table`` and
        ``seq_lens``, ``cache_seqlens`` or ``context_lens``). A kernel with ``k`` and a block table
        (`flash_attn_with_kvcache`) appends ``k`` after ``cache_seqlens``.

        Args:
            op: the kernel.
            padding_slot: value of ``slot_mapping`` for tokens that the kernel skips; None: it
                writes all tokens.
            window: sliding window of the kernel, in tokens: blocks before it may be anything; None:
                it reads all tokens.

        Raises:
            TypeError: the kernel lacks these parameters.
        """
        signature = inspect.signature(op)
        names = [*signature.parameters]
        cache, slots, table, lengths = (
            next((each for each in known if each in names), None)
            for known in (_CACHES, _SLOTS, _TABLES, _LENGTHS)
        )
        if cache is None or (slots is None and (table is None or lengths is None)):
            raise TypeError(
                "expected a kernel with a key cache and either slot_mapping or a block table and "
                f"lengths, got {', '.join(names)}: wrap a lambda with such parameter names"
            )

        @functools.wraps(op)
        def checked(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            values = given.arguments
            layer = self._layer_of.get(values[cache].data_ptr())
            if layer is None:
                raise ValueError(
                    "expected a cache that was passed to kv_sanitizer, got another tensor: pass "
                    "the tensors of all layers"
                )
            where = None if slots is None else values[slots]
            rows = None if table is None else values[table]
            known = None if lengths is None else values[lengths]
            self._check_call(layer, where, rows, known, values.get("k"), padding_slot, window)
            return op(*args, **kwargs)

        return cast(Op, checked)

    def _check_call(
        self,
        layer: int,
        slots: Tensor | None,
        table: Tensor | None,
        lengths: Tensor | None,
        appended: Tensor | None,
        padding: int | None,
        window: int | None,
    ) -> None:
        shadow, size = self._shadow, self._shadow.block_size
        if slots is None and (table is None or lengths is None):
            raise ValueError(
                "expected slot_mapping, or a block table and lengths, got a call with neither: "
                "the sanitizer cannot check it, so do not wrap this kernel"
            )
        if appended is not None and table is not None and lengths is not None:
            new = torch.arange(appended.shape[1], device=table.device)
            position = lengths[:, None] + new
            slots = (table.gather(1, position // size) * size + position % size).flatten()
            lengths = lengths + appended.shape[1]
        elif slots is not None and padding is not None:
            slots = torch.where(slots == padding, 0, slots)
        tags = self._tags[layer]
        count = 0 if slots is None else slots.shape[0]
        if slots is not None:
            metadata = UnifiedMetadata(size, slots)
            step = step_shadow(shadow, metadata)
            check_layer(LayerShadow(tags, shadow.error(2 * layer), step), slots, reads=False)
        if table is not None and lengths is not None:
            known = shadow.first("lengths", lengths.shape[0])
            starts = torch.nn.functional.pad(shadow.first("counts", len(known)).cumsum(0), (1, 0))
            # The lengths of padded rows do not matter.
            lengths = torch.where(known == 0, 0, lengths)
            none = shadow.first("slots", count)
            metadata = UnifiedMetadata(
                size, none, block_tables=table, seq_lens=lengths, query_start_loc=starts
            )
            step = step_shadow(shadow, metadata, window=window)
            check_layer(LayerShadow(tags, shadow.error(2 * layer + 1), step), None)


def _check_blocks(tensor: Tensor, block_size: int, num_blocks: int | None) -> None:
    shape = [*tensor.shape]
    if num_blocks is None:
        # Of [slots, heads, dim] the heads may be as many as the slots of a block.
        if len(shape) < 4 or block_size not in shape[1:]:
            raise ValueError(
                f"expected a cache [num_blocks, ..] with an axis of block_size {block_size} and at "
                f"least 4 axes, got {shape}: pass num_blocks={shape[0]}, or num_blocks="
                f"{shape[0] // block_size} if axis 0 is slots"
            )
    elif shape[0] not in (num_blocks, num_blocks * block_size):
        raise ValueError(
            f"expected {num_blocks} blocks or {num_blocks * block_size} slots on axis 0 of each "
            f"cache, got {shape}: correct num_blocks or block_size"
        )


def _refuse_overlap(tensors: Sequence[Tensor]) -> None:
    if not tensors:
        raise ValueError("expected cache tensors, got none: pass those of each layer")
    spans = sorted((each.data_ptr(), each.data_ptr() + each.nbytes) for each in tensors)
    for (_, end), (start, _) in itertools.pairwise(spans):
        if start < end:
            raise ValueError(
                "expected layers with memory of their own, got two that share some: pass each "
                "tensor once"
            )
