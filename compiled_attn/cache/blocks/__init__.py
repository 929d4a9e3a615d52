"""Block tables, reference counts and the prefix cache of a paged KV cache.

:class:`BlockPool` is the entry point: it allocates blocks to requests as :class:`BlockTable`,
shares equal prompt prefixes through a :class:`PrefixIndex`, and reports :class:`PoolStats`. Host
code only: it touches no tensor.
"""

from __future__ import annotations

from compiled_attn.cache.blocks.pool import BlockPool
from compiled_attn.cache.blocks.prefix import PrefixIndex
from compiled_attn.cache.blocks.stats import PoolStats
from compiled_attn.cache.blocks.table import BlockTable
from compiled_attn.errors import DuplicateRequest, OutOfBlocks, UnknownRequest

__all__ = [
    "BlockPool",
    "BlockTable",
    "DuplicateRequest",
    "OutOfBlocks",
    "PoolStats",
    "PrefixIndex",
    "UnknownRequest",
]
