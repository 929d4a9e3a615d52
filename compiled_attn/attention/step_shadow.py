"""Compares the metadata of a step with what the host expects, inside graphs (sanitizer)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from compiled_attn.attention.metadata import UnifiedMetadata
from compiled_attn.cache.slot_shadow import FIELDS, FINE, SlotShadow, StepShadow, first_of

__all__ = ["logits_shadow", "step_shadow"]


class _Entries(NamedTuple):
    """Blocks that a step reads, see `StepShadow`."""

    blocks: Tensor
    expected: Tensor
    request: Tensor
    starts: Tensor

    def weights(self) -> Tensor:
        """Returns ``tag * (2 * position + 1)`` of slots that are read, ``[N, block_size]``."""
        positions = self.starts[:, None] + torch.arange(
            self.expected.shape[1], device=self.starts.device
        )
        return self.expected * (2 * positions + 1)


def step_shadow(
    shadow: SlotShadow,
    metadata: UnifiedMetadata,
    ids: Tensor | None = None,
    window: int | None = None,
) -> StepShadow:
    """Returns what the layers of a step compare; checks the metadata of the step.

    The error record of the step gets the indices of the first wrong token id, position, length,
    number of new tokens, and token whose parts do not cover the tokens that it must see.

    Args:
        shadow: filled for the step.
        metadata: metadata of the whole step, without a window.
        ids: ``[T]`` token ids; None: unknown.
        window: sliding window in table layout; None: none.
    """
    count = metadata.slot_mapping.shape[0]
    slots, tags, request, positions = (
        shadow.first(name, count) for name in ("slots", "tags", "request", "positions")
    )
    wrong = [torch.full((1,), FINE, device=slots.device)] * FIELDS
    if ids is not None:
        wrong[0] = first_of(ids != shadow.first("ids", count))
    if metadata.positions is not None:
        wrong[1] = first_of(metadata.positions != positions)
    entries = []
    if metadata.by_request is not None:
        tables, lengths, starts = metadata.by_request
        rows, known, new = (
            shadow.first(name, lengths.shape[0]) for name in ("rows", "lengths", "counts")
        )
        wrong[2] = first_of(lengths != known)
        wrong[3] = first_of(starts[1:] - starts[:-1] != new)
        first = None if window is None else known - new - window + 1
        row = torch.arange(rows.shape[0], device=rows.device)
        entries.append(_of_tables(shadow, tables, rows, known, row, first))
    if metadata.has_parts:
        seen, parts = _of_parts(shadow, metadata, request, _of_causal(metadata, positions, tags))
        wrong[4] = first_of(seen != shadow.first("sums", count))
        entries += parts
    error = shadow.error(shadow.layers + 1)
    error.copy_(torch.minimum(error, torch.cat(wrong)))  # a step may have several calls
    if not entries:
        return StepShadow(slots, tags, None, None, None, None)
    fields = zip(*entries, strict=True)
    whole = [each[0] if len(entries) == 1 else torch.cat(each) for each in fields]
    return StepShadow(slots, tags, *whole)


def logits_shadow(
    shadow: SlotShadow,
    metadata: UnifiedMetadata,
    rows: Tensor,
    tokens: int,
    window: int | None = None,
) -> StepShadow:
    """Returns what the last layer compares for the ``rows [L]`` that need logits.

    Args:
        shadow: filled for the step.
        metadata: metadata of these rows, as requests of one token each.
        rows: their indices among the tokens of the step.
        tokens: number of tokens of the step.
        window: sliding window; None: none.
    """
    assert metadata.by_request is not None
    row = torch.arange(rows.shape[0], device=rows.device)
    is_real = row < shadow.get_buffer("logits")
    request = shadow.first("request", tokens)[rows]
    place = torch.where(is_real, shadow.get_buffer("rows")[request], shadow.requests)
    lengths = torch.where(is_real, shadow.first("positions", tokens)[rows] + 1, 0)
    first = None if window is None else lengths - window
    entries = _of_tables(shadow, metadata.by_request[0], place, lengths, request, first)
    nothing = torch.zeros_like(rows)
    return StepShadow(nothing, nothing.int(), *entries, shadow.error(shadow.layers))


def _of_tables(
    shadow: SlotShadow,
    tables: Tensor,
    rows: Tensor,
    lengths: Tensor,
    request: Tensor,
    first: Tensor | None,
) -> _Entries:
    width, size = tables.shape[1], shadow.block_size
    position = torch.arange(width * size, device=tables.device)
    is_read = position < lengths[:, None]
    if first is not None:
        is_read = is_read & (position >= first[:, None])
    expected = shadow.get_buffer("expected")[:, : width * size][rows]
    starts = torch.arange(width, device=tables.device) * size
    return _Entries(
        tables.long().flatten(),
        torch.where(is_read, expected, 0).view(-1, size),
        request[:, None].expand(-1, width).flatten(),
        starts.expand(tables.shape[0], width).flatten(),
    )


def _of_causal(m: UnifiedMetadata, positions: Tensor, tags: Tensor) -> Tensor:
    weights = tags * (2 * positions + 1)
    if m.causal_bias is None:
        return torch.zeros_like(weights)
    bias = m.causal_bias if m.causal_bias.dim() == 2 else m.causal_bias.amax(0)
    return torch.where(bias > -torch.inf, weights, 0).sum(-1)


def _of_parts(
    shadow: SlotShadow, m: UnifiedMetadata, request: Tensor, seen: Tensor
) -> tuple[Tensor, list[_Entries]]:
    """Adds the sums over the parts that each token reads to ``seen [T]``; returns it and blocks."""
    size, parts = shadow.block_size, []
    if m.unique_blocks is not None and m.unique_bias is not None:
        blocks = m.unique_blocks
        if isinstance(blocks, int):
            blocks = torch.arange(blocks, device=m.unique_bias.device)
        reader = m.needs(m.unique_block_mapping, "unique_block_mapping").long()
        starts = m.needs(m.unique_starts, "unique_starts").long()
        bias = m.unique_bias if m.unique_bias.dim() == 2 else m.unique_bias.amax(1)
        usage = (bias > -torch.inf).sum(-1)
        unique = _of_blocks(shadow, blocks, request[reader], starts, usage)
        parts.append(unique)
        seen = seen.index_add(0, reader, unique.weights().sum(-1))
    if m.shared_blocks is not None and m.shared_bias is not None:
        bias, starts = m.shared_bias, m.needs(m.shared_starts, "shared_starts").long()
        if bias.is_floating_point():
            bias = bias if bias.dim() == 3 else bias.amax(0)
            usage = (bias > -torch.inf).sum(-1)
        else:
            usage = bias.long().clamp(0, size)
        most, reader = usage.max(0)
        shared = _of_blocks(shadow, m.shared_blocks, request[reader], starts, most)
        parts.append(shared)
        up_to = torch.nn.functional.pad(shared.weights().cumsum(-1), (1, 0)).flatten()
        column = torch.arange(usage.shape[1], device=usage.device) * (size + 1)
        seen = seen + up_to[usage + column].sum(-1)
    return seen, parts


def _of_blocks(
    shadow: SlotShadow, blocks: Tensor, request: Tensor, starts: Tensor, usage: Tensor
) -> _Entries:
    known = shadow.get_buffer("expected")
    offset = torch.arange(shadow.block_size, device=blocks.device)
    position = (starts[:, None] + offset).clamp(0, known.shape[1] - 1)
    tags = known[shadow.get_buffer("rows")[request][:, None], position]
    expected = torch.where(offset < usage[:, None], tags, 0)
    return _Entries(blocks.long(), expected, request, starts)
