"""Detects ranks that exited: by a failed collective, or by torchrun's SIGTERM."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from compiled_attn.errors import RankLost

__all__ = ["Peers"]

_PATIENCE_S = 2.0  # a connection closes before its process is seen to exit


class Peers:
    """The processes of all ranks.

    Args:
        addresses: host and process id of each rank.
    """

    def __init__(self, addresses: Sequence[tuple[str, int]]) -> None:
        self._addresses = addresses
        self._is_reported = False

    def explain(self, failure: str) -> str:
        """Return a message about exited ranks for a failed call; empty if none has."""
        is_lost = "onnection" in failure or "imed out" in failure or "peer" in failure
        end = time.monotonic() + (_PATIENCE_S if is_lost else 0)
        while not (lost := self._lost()) and time.monotonic() < end:
            time.sleep(0.02)
        if not lost and not is_lost:
            return ""
        self._is_reported = True
        return self._message(lost or f"one of them ({failure.splitlines()[0]})")

    @contextmanager
    def handle_signals(self) -> Iterator[Self]:
        """Turn SIGINT and SIGTERM into one KeyboardInterrupt, see `join_ranks`."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
        try:
            for each in before:
                signal.signal(each, self._interrupt)
            yield self
        except KeyboardInterrupt as error:
            if str(error):
                raise RankLost(str(error)) from None
            raise
        finally:
            if not self._is_reported:  # otherwise torchrun's own signal may still come
                for each, handler in before.items():
                    signal.signal(each, handler)

    def _interrupt(self, number: int, _: Any) -> None:
        if self._is_reported:  # torchrun repeats SIGINT, and sends SIGTERM after a loss
            return
        self._is_reported = True
        if number == signal.SIGTERM and (lost := self._lost()):
            raise KeyboardInterrupt(self._message(lost))
        raise KeyboardInterrupt

    def _message(self, lost: str) -> str:
        return (
            f"expected {len(self._addresses)} ranks, got no answer of {lost}: see its own output, "
            "and start all ranks again"
        )

    def _lost(self) -> str:
        here = socket.gethostname()
        return ", ".join(
            f"rank {rank} (process {pid}), which exited"
            for rank, (host, pid) in enumerate(self._addresses)
            if host == here and not _is_alive(pid)
        )


def _is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")
