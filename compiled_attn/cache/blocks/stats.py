"""The figures of a block pool at one moment."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PoolStats"]


@dataclass(frozen=True, slots=True)
class PoolStats:
    """A snapshot of a ``BlockPool``; ``used + free + cached == total``, the null block not counted.

    Attributes:
        total: blocks that can be handed out.
        used: blocks that a request (or a copy that is still to be performed) holds.
        free: blocks without content.
        cached: blocks that no request holds, kept for their content until they are evicted.
        requests: requests that hold a table.
        highest_used: the highest place in use now, 0 where none is; over ``used`` it says how
            spread out they are. Without defragmentation a block's place is its id.
        high_water: the highest place that was ever in use.
        peak_used: the most blocks that were ever in use at once.
        allocations: blocks handed out so far, prefix hits not counted.
        evictions: allocations that dropped cached content.
        copies: copies on write so far, those of partial hits included.
        preemptions: requests preempted so far.
        queried_tokens: tokens of all prompts that were looked up in the prefix cache.
        hit_tokens: those of them that were found.
        partial_hit_tokens: those of them that were found at the beginning of a block, which was
            copied.
        fragmented_slots: slots of used blocks beyond the length of the tables that end there, a
            shared block once.
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
    partial_hit_tokens: int
    fragmented_slots: int

    @property
    def hit_ratio(self) -> float:
        """Found tokens over looked-up tokens, 0 where none was looked up."""
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0

    def fragmented_bytes(self, bytes_per_slot: int) -> int:
        """Bytes lost to internal fragmentation; a slot takes ``bytes_per_slot`` over all layers."""
        return self.fragmented_slots * bytes_per_slot
