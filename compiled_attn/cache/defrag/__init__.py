"""Online defragmentation: moves the used blocks of a cache to its beginning.

:class:`BlockSwap` exchanges and moves blocks in captured graphs; :class:`OnlineDefragmenter` plans
the moves.
"""

from __future__ import annotations

from compiled_attn.cache.defrag.defragmenter import (
    DefragReport,
    DefragTotals,
    Move,
    OnlineDefragmenter,
)
from compiled_attn.cache.defrag.logical import LogicalBlocks
from compiled_attn.cache.defrag.swap import PAD_SIZES, BlockSwap

__all__ = [
    "PAD_SIZES",
    "BlockSwap",
    "DefragReport",
    "DefragTotals",
    "LogicalBlocks",
    "Move",
    "OnlineDefragmenter",
]
