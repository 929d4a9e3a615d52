"""The end of a rank, as the others learn of it: by a call that fails, or by torchrun's SIGTERM."""

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

__all__ = ["Ending"]

_PATIENCE_S = 2.0  # a connection closes before its process is seen to have ended


class Ending:
    """Says which ranks have ended.

    Args:
        peers: host and process id of each rank.
    """

    def __init__(self, peers: Sequence[tuple[str, int]]) -> None:
        self._peers = peers
        self._is_known = False

    def why(self, failure: str) -> str:
        """The line about the ranks that have ended, for a call that failed; empty: none has."""
        is_lost = "onnection" in failure or "imed out" in failure or "peer" in failure
        end = time.monotonic() + (_PATIENCE_S if is_lost else 0)
        while not (lost := self._lost()) and time.monotonic() < end:
            time.sleep(0.02)
        if not lost and not is_lost:
            return ""
        self._is_known = True
        return self._line(lost or f"one of them ({failure.splitlines()[0]})")

    @contextmanager
    def heeded(self) -> Iterator[Self]:
        """Turns SIGINT and SIGTERM into one KeyboardInterrupt, see `joined_ranks`."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
        try:
            for each in before:
                signal.signal(each, self._hear)
            yield self
        except KeyboardInterrupt as error:
            if str(error):
                raise RankLost(str(error)) from None
            raise
        finally:
            if not self._is_known:  # or else torchrun's own may still come
                for each, handler in before.items():
                    signal.signal(each, handler)

    def _hear(self, number: int, _: Any) -> None:
        if self._is_known:  # torchrun sends SIGINT once more, and SIGTERM to who has noticed
            return
        self._is_known = True
        if number == signal.SIGTERM and (lost := self._lost()):
            raise KeyboardInterrupt(self._line(lost))
        raise KeyboardInterrupt

    def _line(self, lost: str) -> str:
        return (
            f"expected {len(self._peers)} ranks, got no answer of {lost}: look at its own output, "
            "and start all of them again"
        )

    def _lost(self) -> str:
        here = socket.gethostname()
        gone = [
            f"rank {rank} (process {pid}), which has ended"
            for rank, (host, pid) in enumerate(self._peers)
            if host == here and not _is_alive(pid)
        ]
        return ", ".join(gone)


def _is_alive(pid: int) -> bool:
    """Whether a process runs; one that waits for its parent to notice its end does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")
