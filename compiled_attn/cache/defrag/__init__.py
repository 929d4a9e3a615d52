"""Online defragmentation: the used blocks of a cache are kept together at its beginning.

:class:`BlockSwap` exchanges and moves blocks in captured graphs; :class:`OnlineDefragmenter` says
which, and keeps account of where they are.
"""

from __future__ import annotations

from compiled_attn.cache.defrag.defragmenter import BlockCopies, OnlineDefragmenter
from compiled_attn.cache.defrag.report import DefragReport, DefragTotals, Move
from compiled_attn.cache.defrag.swap import PAD_SIZES, BlockSwap

__all__ = [
    "PAD_SIZES",
    "BlockCopies",
    "BlockSwap",
    "DefragReport",
    "DefragTotals",
    "Move",
    "OnlineDefragmenter",
]
