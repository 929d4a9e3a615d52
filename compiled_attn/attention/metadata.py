"""The metadata of one step: which token sees what, in tensors of fixed shape."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_attn.attention.scoring import by_position, check_window
from compiled_attn.attention.state import FEPS, FMIN
from compiled_attn.cache.kv_cache import usage_bias

__all__ = ["KeyRanks", "UnifiedMetadata", "through"]


class KeyRanks(NamedTuple):
    """Ranks that each store some of the keys and values of a request.

    Args:
        group: name of their process group.
        size: number of ranks.
    """

    group: str
    size: int


@dataclass(frozen=True)
class UnifiedMetadata:
    """Which token sees what in one step; every tensor has the fixed shape of its bucket.

    Shape (T tokens, S shared blocks, U unique blocks):
        - slot_mapping: ``[T]`` ints, cache slot of each new token; padding points into null block 0
        - causal_bias: ``[T, T]`` float or None, 0 if token i sees new token j, else -inf
        - causal_width: int or None, queries in a slice of the causal part; None: one slice
        - shared_blocks: ``[S]`` ints or None, blocks that are compared with every query
        - shared_bias: ``[T, S, block_size]`` float, or usages ``[T, S]`` ints (number of leading
          slots of a block that a token sees), or None
        - shared_chunk: int or None, shared blocks compared at a time, with the bias of each chunk
          built from its usages; None: all at once
        - unique_blocks: ``[U]`` ints, or int U (the first U blocks of the cache), or None
        - unique_block_mapping: ``[U]`` ints, row of T that reads each unique block
        - unique_bias: ``[U, block_size]`` float or None

    A bias may also have an axis of heads: ``[H, T, T]``, ``[H, T, S, block_size]``, ``[U, H,
    block_size]``.

    Only features that depend on positions (`with_positions`) need these:
        - positions: ``[T]`` ints, position of each token in its sequence
        - shared_starts: ``[S]`` ints, position of the first slot of each shared block
        - unique_starts: ``[U]`` ints, the same for the unique blocks

    The same step in table layout, for the native kernel; the other parts may then be omitted:
        - block_tables: ``[R, W]`` ints, blocks of each request in order; padding is never read
        - seq_lens: ``[R]`` ints, tokens of each request with those of this step; 0 for padding
        - query_start_loc: ``[R + 1]`` ints, rows of T of each request, as a running sum

    Layers with a recurrent state need the table layout and:
        - state_slots: ``[R]`` int32, slot of the state of each request; 0 for padding

    A step whose keys are on several ranks has table layout:
        - ranks: the ranks; ``block_tables`` and ``seq_lens`` then describe the keys of earlier
          steps on this rank, and ``slot_mapping`` points into null block 0 for new tokens stored
          on another one. None: all keys are on this rank

    - segment: see `compiled_attn.ops.reference.paged_attention`; only in table layout

    Two optional fields save work:
        - shared_lengths: ``[S]`` ints, leading slots of each shared block that any token sees
        - unique_queries: ``[Q]`` ints, the rows in ``unique_block_mapping``, padded with -1
    """

    block_size: int
    slot_mapping: Tensor
    causal_bias: Tensor | None = None
    causal_width: int | None = None
    shared_blocks: Tensor | None = None
    shared_bias: Tensor | None = None
    unique_blocks: Tensor | int | None = None
    unique_block_mapping: Tensor | None = None
    unique_bias: Tensor | None = None
    fmin: float = FMIN
    feps: float = FEPS
    positions: Tensor | None = None
    shared_starts: Tensor | None = None
    unique_starts: Tensor | None = None
    shared_lengths: Tensor | None = None
    unique_queries: Tensor | None = None
    shared_chunk: int | None = None
    block_tables: Tensor | None = None
    seq_lens: Tensor | None = None
    query_start_loc: Tensor | None = None
    ranks: KeyRanks | None = None
    segment: int | None = None
    state_slots: Tensor | None = None

    @property
    def by_request(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Block tables, sequence lengths and first rows of requests; None without table layout."""
        if self.block_tables is None or self.seq_lens is None or self.query_start_loc is None:
            return None
        return self.block_tables, self.seq_lens, self.query_start_loc

    @property
    def has_parts(self) -> bool:
        """Whether there is a causal, shared or unique part."""
        return self.causal_bias is not None or self.num_blocks > 0

    @property
    def is_prompt(self) -> bool:
        """Whether the step has a causal part."""
        return self.causal_bias is not None

    @property
    def num_blocks(self) -> int:
        """Number of shared and unique blocks, including padding."""
        unique = self.unique_blocks
        num_unique = unique if isinstance(unique, int) else _rows(unique)
        return _rows(self.shared_blocks) + num_unique

    @property
    def seq_len(self) -> int:
        """T if the step has a causal part, else 1."""
        return self.slot_mapping.shape[0] if self.is_prompt else 1

    def through(self, block_of: Tensor) -> UnifiedMetadata:
        """Returns the table layout with other blocks: ``block_of [num_blocks]`` in their places."""
        tables = self.needs(self.block_tables, "block_tables")
        slots = through(self.slot_mapping, block_of, self.block_size)
        return replace(self, slot_mapping=slots, block_tables=block_of[tables])

    def windowed(self, window: int) -> UnifiedMetadata:
        """Calls `with_positions` for a sliding window only."""
        return self.with_positions(window=window)

    def with_positions(
        self, *, window: int | None = None, alibi_slopes: Tensor | None = None
    ) -> UnifiedMetadata:
        """Adds a sliding window and ALiBi to the biases of the step; drops the table layout.

        Args:
            window: number of visible tokens including itself; None: all before it.
            alibi_slopes: ``[H]`` slopes; a key's score gains ``slope * (key position - query
                position)``, which is at most 0.

        Raises:
            ValueError: the window is not positive, or the metadata has no positions.

        Source: sliding windows as in Mistral, ALiBi of Press et al., 2022.
        """
        if window is None and alibi_slopes is None:
            return self
        check_window(window)
        positions = self.needs(self.positions, "positions")
        causal, shared, unique = self.causal_bias, self.shared_bias, self.unique_bias
        if causal is not None:
            causal = by_position(causal, positions, positions, window, alibi_slopes)
        if shared is not None:
            starts = self.needs(self.shared_starts, "shared_starts")
            if not shared.is_floating_point():
                shared = usage_bias(shared, self.block_size)
            keys = self._slots(starts).flatten()
            flat = by_position(shared.flatten(-2), positions, keys, window, alibi_slopes)
            shared = flat.unflatten(-1, (-1, self.block_size))
        if unique is not None:
            starts = self.needs(self.unique_starts, "unique_starts")
            mapping = self.needs(self.unique_block_mapping, "unique_block_mapping")
            by_head = unique.transpose(0, 1) if unique.dim() == 3 else unique
            keys = self._slots(starts)
            unique = by_position(by_head, positions[mapping], keys, window, alibi_slopes)
            unique = unique.transpose(0, 1) if unique.dim() == 3 else unique
        return replace(
            self, causal_bias=causal, shared_bias=shared, unique_bias=unique, block_tables=None,
            seq_lens=None, query_start_loc=None,
        )  # fmt: skip

    def chunks_of_shared(self) -> Iterator[UnifiedMetadata]:
        """Yields the shared part of the step, `shared_chunk` blocks at a time."""
        blocks, bias = self.shared_blocks, self.shared_bias
        if blocks is None or bias is None:
            return
        width = self.shared_chunk or max(blocks.shape[0], 1)
        for start in range(0, blocks.shape[0], width):
            part = slice(start, start + width)
            yield replace(
                self,
                causal_bias=None,
                unique_bias=None,
                shared_blocks=blocks[part],
                shared_bias=bias[..., part, :] if bias.is_floating_point() else bias[:, part],
                shared_starts=None if self.shared_starts is None else self.shared_starts[part],
                shared_lengths=None if self.shared_lengths is None else self.shared_lengths[part],
            )

    def _slots(self, starts: Tensor) -> Tensor:
        return starts.unsqueeze(-1) + torch.arange(self.block_size, device=starts.device)

    @staticmethod
    def needs(tensor: Tensor | None, name: str) -> Tensor:
        """Returns a field that windows and ALiBi need; ValueError if it is None."""
        if tensor is None:
            raise ValueError(
                f"metadata.{name}: expected it for a sliding window or ALiBi, got None: "
                "fill it, or use BatchBuilder"
            )
        return tensor


def through(slots: Tensor, block_of: Tensor, block_size: int) -> Tensor:
    """Returns slots ``[T]`` in other blocks: ``block_of [num_blocks]`` in the places of theirs."""
    return block_of[slots // block_size] * block_size + slots % block_size


def _rows(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel()
