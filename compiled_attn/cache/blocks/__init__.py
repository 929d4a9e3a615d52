"""The blocks of a paged KV cache: their holders, their content, and the next one to hand out.

:class:`BlockPool` is the one way in. It hands out block ids to requests as :class:`BlockTable`,
shares equal prompt prefixes through a :class:`PrefixIndex`, knows in :class:`BlockPlaces` where in
the cache each block lies, and says in :class:`PoolStats` how it goes. Host code only: no tensor is
touched here; the copies that sharing makes necessary are listed by ``BlockPool.pending_copies``.
"""

from __future__ import annotations

from compiled_attn.cache.blocks.places import BlockPlaces
from compiled_attn.cache.blocks.pool import BlockPool
from compiled_attn.cache.blocks.prefix import PrefixIndex
from compiled_attn.cache.blocks.stats import PoolStats
from compiled_attn.cache.blocks.table import BlockTable
from compiled_attn.errors import DuplicateRequest, OutOfBlocks, UnknownRequest

__all__ = [
    "BlockPlaces",
    "BlockPool",
    "BlockTable",
    "DuplicateRequest",
    "OutOfBlocks",
    "PoolStats",
    "PrefixIndex",
    "UnknownRequest",
]
