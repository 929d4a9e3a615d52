"""Process groups on Linux: CPU seconds, memory, stop and continue."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")


def members(session: int) -> Iterator[int]:
    """The processes of a session."""
    for each in _PROC.iterdir():
        if each.name.isdigit() and (fields := _stat(int(each.name))) and int(fields[3]) == session:
            yield int(each.name)


def cpu_seconds(session: int) -> float:
    """Return CPU seconds of its processes, and of their children that have exited."""
    used = (_stat(pid)[11:15] for pid in members(session))
    return sum(int(ticks) for each in used for ticks in each) / _TICKS


def peak_bytes(session: int) -> int:
    """Resident memory of its processes, each at its highest; what they share counts for each."""
    return sum(_peak(pid) for pid in members(session))


def send(session: int, number: signal.Signals) -> None:
    """Sends a signal to all of them."""
    for pid in [*members(session)]:
        try:
            os.kill(pid, number)
        except ProcessLookupError:  # it has just exited
            continue


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third on; none if there is no such process."""
    try:
        line = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return []
    return line.rpartition(")")[2].split()


def _peak(pid: int) -> int:
    try:
        lines = (_PROC / str(pid) / "status").read_text().splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
