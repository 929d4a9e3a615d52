"""Statistics of a block pool."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PoolStats"]


@dataclass(frozen=True, slots=True)
class PoolStats:
    """A snapshot of a ``BlockPool``; ``used + free + cached == total``, without the null block.

    Attributes:
        total: blocks that can be allocated.
        used: blocks held by a request or pinned by a pending copy.
        free: blocks without content.
        cached: blocks that no request holds, with content that can be found until they are evicted.
        requests: requests that hold a table.
        highest_used: the highest used block, 0 if none is; divided by ``used`` it measures how
            spread out the used blocks are.
        high_water: the highest block that was ever used.
        peak_used: the largest number of blocks ever used at once.
        allocations: blocks allocated so far, not counting prefix hits.
        evictions: allocations that evicted cached content.
        copies: copies on write so far.
        preemptions: requests preempted so far.
        queried_tokens: prompt tokens that were looked up in the prefix cache.
        hit_tokens: prompt tokens that were found there.
        fragmented_slots: slots of used blocks beyond the length of the tables that end there; a
            shared block counts once.
    """

    total: int
    used: int
    free: int
    cached: int
    requests: int
    highest_used: int
    high_water: int
    peak_used: int
    allocations: int
    evictions: int
    copies: int
    preemptions: int
    queried_tokens: int
    hit_tokens: int
    fragmented_slots: int

    @property
    def hit_ratio(self) -> float:
        """``hit_tokens / queried_tokens``, 0 if no token was queried."""
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0

    def fragmented_bytes(self, bytes_per_slot: int) -> int:
        """Bytes lost to internal fragmentation, at ``bytes_per_slot`` over all layers."""
        return self.fragmented_slots * bytes_per_slot
