"""Events on their way to whom they belong: none is lost, none comes twice."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from itertools import islice
from typing import Generic, TypeVar

__all__ = ["Mailbox"]

Event = TypeVar("Event")


class Mailbox(Generic[Event]):
    """Events that wait for one reader, each under a key.

    An event that is put again under its key is the same event. What was handed out is kept until
    the reader says that it arrived, so that an interrupt on the way back to the caller loses
    nothing.
    """

    def __init__(self) -> None:
        self._events: dict[Hashable, Event] = {}
        self._handed_out = 0

    def put(self, events: Mapping[Hashable, Event]) -> None:
        """Adds events under their keys; those that are here already stay where they are."""
        self._events.update(events)

    def hand_out(self) -> list[Event]:
        """All events, oldest first; they stay until `arrived`."""
        self._handed_out = len(self._events)
        return list(self._events.values())

    def hand_out_first(self) -> Event:
        """The oldest event, of which there is one; it stays until `arrived`."""
        self._handed_out = 1
        return next(iter(self._events.values()))

    def arrived(self) -> None:
        """What was handed out last is with the reader."""
        rest = islice(self._events.items(), self._handed_out, None)
        self._events, self._handed_out = dict(rest), 0

    def came_back(self) -> None:
        """What was handed out last did not reach the reader, and is handed out again."""
        self._handed_out = 0

    def __len__(self) -> int:
        """How many events the reader has not got yet."""
        return len(self._events) - self._handed_out
