"""What can go wrong with blocks. Every error names the request and leaves the pool as it was."""

from __future__ import annotations

import operator
from collections.abc import Hashable

__all__ = ["DuplicateRequest", "OutOfBlocks", "UnknownRequest"]


class OutOfBlocks(RuntimeError):
    """A request asked for more blocks than are free or evictable; nothing was allocated.

    Attributes:
        request_id: the request that asked.
        length: the positions it wanted to hold.
        needed: the blocks that were missing.
        free: free blocks without content.
        cached: blocks that nobody holds, whose content is kept until they are evicted.
        total: blocks of the pool, without the null block.
    """

    def __init__(
        self, request_id: Hashable, length: int, needed: int, free: int, cached: int, total: int
    ) -> None:
        super().__init__(request_id, length, needed, free, cached, total)
        self.request_id = request_id
        self.length = length
        self.needed = needed
        self.free = free
        self.cached = cached
        self.total = total

    def __str__(self) -> str:
        return (
            f"request {self.request_id!r} needs {self.needed} more blocks to hold {self.length} "
            f"tokens, got {self.free + self.cached} of {self.total} ({self.free} free + "
            f"{self.cached} cached): preempt or free a request, or make the pool larger"
        )


class UnknownRequest(KeyError):
    """No request of this id holds blocks: it was never added, or was freed or preempted before."""

    def __init__(self, request_id: Hashable) -> None:
        super().__init__(request_id)
        self.request_id = request_id

    def __str__(self) -> str:
        return (
            f"expected a request of this pool, got {self.request_id!r}, which was never added "
            "or is already freed or preempted: add it first"
        )


class DuplicateRequest(ValueError):
    """A request of this id is already in the pool."""

    def __init__(self, request_id: Hashable) -> None:
        super().__init__(request_id)
        self.request_id = request_id

    def __str__(self) -> str:
        return (
            f"expected a new request id, got {self.request_id!r}, which holds blocks: free it first"
        )


def whole(name: str, value: int, minimum: int) -> int:
    """Return ``value`` as an int of at least ``minimum``, or raise an error that names it."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"expected an integer {name}, got {value!r}: pass an int") from None
    if number < minimum:
        raise ValueError(f"expected {name} >= {minimum}, got {number}: pass a larger one")
    return number
