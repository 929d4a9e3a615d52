"""Transactions of an engine: an exception rolls one back, Ctrl-C waits for its end."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["Transactions", "delayed_interrupt"]


class Transactions:
    """Runs transactions on requests and blocks, one at a time.

    Args:
        rollback: called after an exception in a transaction.
    """

    def __init__(self, rollback: Callable[[], None]) -> None:
        self._rollback = rollback
        self._lock = threading.RLock()
        self._is_running = False

    def run(self, transaction: Callable[[], None]) -> bool:
        """Runs a transaction, or rolls it back; False: another is running, so it does nothing."""
        with delayed_interrupt():
            if not self._lock.acquire(blocking=False):  # another thread
                return False
            try:
                if self._is_running:  # this thread, within a transaction
                    return False
                self._run(transaction)
            finally:
                self._lock.release()
        return True

    def _run(self, transaction: Callable[[], None]) -> None:
        try:
            self._is_running = True
            transaction()
        except BaseException:
            self._rollback()
            raise
        finally:
            self._is_running = False


@contextlib.contextmanager
def delayed_interrupt(undo: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Delays Ctrl-C to the end of the block; a second one interrupts at once.

    Either, like any exception in the block, is raised after ``undo``.
    Only the main thread receives signals: elsewhere this does nothing.
    """
    handler = signal.getsignal(signal.SIGINT)
    delays = threading.current_thread() is threading.main_thread() and callable(handler)
    received: list[tuple[Any, ...]] = []

    def receive(*signal_and_frame: Any) -> None:
        received.append(signal_and_frame)
        if len(received) > 1 and callable(handler):  # the step may hang
            handler(*signal_and_frame)

    try:
        try:
            if delays:
                signal.signal(signal.SIGINT, receive)
            yield
        finally:
            if delays:
                signal.signal(signal.SIGINT, handler)
            if len(received) == 1 and callable(handler):
                handler(*received[0])
    except BaseException:
        undo()
        raise
