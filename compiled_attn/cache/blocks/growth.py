"""The growth of a table by blocks, and the copy on write of a last block that it shares."""

from __future__ import annotations

from compiled_attn.cache.blocks.allocator import BlockAllocator
from compiled_attn.cache.blocks.table import BlockTable

__all__ = ["blocks_needed", "fits", "grow"]


def blocks_needed(table: BlockTable, length: int, blocks: BlockAllocator) -> int:
    """The blocks that holding ``length`` positions takes, that of a copy on write included."""
    if length <= table.length:
        return 0
    missing = -(-length // table.block_size) - len(table.blocks)
    return missing + _writes_into_shared(table, blocks)


def fits(table: BlockTable, needed: int, blocks: BlockAllocator) -> bool:
    """Whether ``needed`` blocks are there, the source of the last block's copy being one."""
    if needed <= blocks.available:
        return True
    can_take_over = bool(table.blocks) and blocks.can_take_over(table.blocks[-1])
    return can_take_over and needed == blocks.available + 1


def grow(table: BlockTable, needed: int, blocks: BlockAllocator) -> list[int]:
    """Adds ``needed`` blocks that fit; returns the new ids, a replacement of the last one first."""
    added = []
    if _writes_into_shared(table, blocks):
        last = table.blocks[-1]
        added = [blocks.copy(last)]
        blocks.release(last)
        needed -= 1
    elif needed > blocks.available:
        added = [blocks.take_over(table.blocks[-1])]
    if added:
        table._replace_last(added[0])
    fresh = [blocks.allocate() for _ in range(needed)]
    table._extend(fresh)
    return added + fresh


def _writes_into_shared(table: BlockTable, blocks: BlockAllocator) -> bool:
    return table.length % table.block_size != 0 and blocks.is_shared(table.blocks[-1])
