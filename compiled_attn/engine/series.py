"""A curve of any length, kept as at most a thousand points."""

from __future__ import annotations

__all__ = ["Series"]

_MOST = 1024


class Series:
    """Every n-th point of a curve, n doubling whenever there are too many.

    The points are kept by their numbers, so that one that is put again changes nothing.
    """

    def __init__(self) -> None:
        self._every = 1
        self._points: dict[int, tuple[float, ...]] = {}

    def put(self, number: int, *point: float) -> None:
        """Keeps point ``number``, if it is one that is kept."""
        if number % self._every:
            return
        self._points[number] = point
        if len(self._points) > _MOST:
            every = 2 * self._every
            kept = {n: p for n, p in self._points.items() if n % every == 0}
            self._every, self._points = every, kept

    def columns(self) -> list[tuple[float, ...]]:
        """The points column by column; none where there is no point."""
        return list(zip(*self._points.values(), strict=True))
