"""The blocks and slots that each row reads in each partition, with every index in range."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from compiled_attn.compat.paged.inputs import DecodeCall

__all__ = ["Pages", "lost_rows", "pages", "unknown_blocks"]


class Pages(NamedTuple):
    """The blocks of S rows in P partitions, at most Wp blocks each, N = Wp * block_size slots.

    Shape:
        - blocks: ``[S, P, Wp]`` ids; block 0 replaces entries that are not blocks
        - positions: ``[P, N]``, position of the token in each slot
        - visible: ``[S, P, N]`` bool, whether the slot holds a token of this row and partition
    """

    blocks: Tensor
    positions: Tensor
    visible: Tensor


def pages(call: DecodeCall, width: int, partition: int | None) -> Pages:
    """Splits the first ``width`` table columns every ``partition`` tokens (None: P = 1)."""
    device, size = call.query.device, call.block_size
    if partition is None:
        columns = torch.arange(width, device=device).unsqueeze(0)
        blocks = call.block_tables[:, :width].unsqueeze(1)
    else:
        columns = _columns(width, size, partition, device)
        blocks = call.block_tables[:, columns.clamp(max=width - 1)]
    slots = torch.arange(size, device=device)
    positions = (columns.unsqueeze(-1) * size + slots).flatten(1)
    visible = positions < call.seq_lens.view(-1, 1, 1)
    if partition is not None:
        own = torch.arange(columns.shape[0], device=device).unsqueeze(-1)
        visible = visible & (positions // partition == own)
    known = (blocks >= 0) & (blocks < call.num_blocks)
    return Pages(torch.where(known, blocks, 0), positions, visible)


def lost_rows(call: DecodeCall) -> Tensor:
    """Returns invalid rows, ``[S]`` bool: too many tokens, or a token without a block."""
    short = (call.seq_lens < 0) | (call.seq_lens > call.capacity)
    return short | unknown_blocks(call).any(-1)


def unknown_blocks(call: DecodeCall) -> Tensor:
    """Used table entries that are not blocks of the cache, ``[S, W]`` bool."""
    table = call.block_tables
    starts = torch.arange(table.shape[1], device=table.device) * call.block_size
    return (starts < call.seq_lens.unsqueeze(-1)) & ((table < 0) | (table >= call.num_blocks))


def _columns(width: int, size: int, partition: int, device: torch.device) -> Tensor:
    """Table columns of each partition, ``[P, Wp]``; a block on a border is in both."""
    count = -(-width * size // partition)
    spans = [((p + 1) * partition - 1) // size - p * partition // size + 1 for p in range(count)]
    first = torch.arange(count, device=device) * partition // size
    return first.unsqueeze(-1) + torch.arange(max(spans), device=device)
