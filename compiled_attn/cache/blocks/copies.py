"""Block copies that were decided on the host and not yet performed on the cache."""

from __future__ import annotations

__all__ = ["PendingCopies"]


class PendingCopies:
    """``source -> destination`` pairs; no source is ever a destination, so any order is right.

    A source is pinned until its copies are performed or cancelled; the owner keeps a reference for
    every pin.
    """

    def __init__(self) -> None:
        self._source_of: dict[int, int] = {}
        self._pins: dict[int, int] = {}

    def source(self, block: int) -> int:
        """Return the block with the content of ``block``: itself, unless it waits for a copy."""
        return self._source_of.get(block, block)

    def pins(self, block: int) -> int:
        """Return how many pending copies read ``block``."""
        return self._pins.get(block, 0)

    def record(self, source: int, destination: int) -> None:
        """Add a copy. ``source`` comes from :meth:`source`, ``destination`` is fresh."""
        self._source_of[destination] = source
        self._pins[source] = self.pins(source) + 1

    def cancel(self, destination: int) -> int | None:
        """Forget the copy into ``destination``; return the source it pinned, or None."""
        source = self._source_of.pop(destination, None)
        if source is not None:
            self._unpin(source)
        return source

    def pairs(self) -> list[tuple[int, int]]:
        """Return all ``(source, destination)`` pairs, oldest first."""
        return [(source, destination) for destination, source in self._source_of.items()]

    def __contains__(self, destination: int) -> bool:
        return destination in self._source_of

    def __len__(self) -> int:
        return len(self._source_of)

    def _unpin(self, source: int) -> None:
        if self._pins[source] == 1:
            del self._pins[source]
        else:
            self._pins[source] -= 1
