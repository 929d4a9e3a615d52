"""Stop strings: where a text ends because of one, and what of it may be shown before that."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["StopFilter", "end_of"]


def end_of(text: str, stop: Sequence[str]) -> int | None:
    """Where a text has to be cut: at the beginning of the stop string that is whole first.

    So it does not matter in which pieces the text came. None: it has no stop string.
    """
    found = [(at + len(each), at) for each in stop if (at := text.find(each)) >= 0]
    return min(found)[1] if found else None


class StopFilter:
    """Lets the pieces of a text through until a stop string, of which no part is shown.

    Args:
        stop: the strings, none of them empty.

    Attributes:
        has_ended: whether one of them came.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = stop
        self._held = ""
        self.has_ended = False

    def put(self, piece: str) -> str:
        """What can be shown now; what may be the beginning of a stop string is held back."""
        if self.has_ended:
            return ""
        text = self._held + piece
        end = end_of(text, self._stop)
        self.has_ended = end is not None
        shown = len(text) - self._undecided(text) if end is None else end
        self._held = text[shown:]
        return text[:shown]

    def rest(self) -> str:
        """What was held back, when nothing follows; nothing behind a stop string."""
        return "" if self.has_ended else self._held

    def _undecided(self, text: str) -> int:
        """Characters at the end of a text that a stop string may begin with."""
        longest = max(map(len, self._stop), default=1)
        return next(
            (
                size
                for size in range(min(longest - 1, len(text)), 0, -1)
                if any(each.startswith(text[-size:]) for each in self._stop)
            ),
            0,
        )
