"""A process that serves, which runs only while it is asked."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers import groups

_LAST_WORDS = 200


class PeerGone(RuntimeError):
    """A process that did not start, or ended; its message is the reason."""


@dataclass(frozen=True)
class Started:
    """The cost of a start until requests can come, and the versions that were started."""

    seconds: float
    cpu_seconds: float
    versions: Mapping[str, str]


@dataclass(frozen=True)
class Served:
    """The cost of some requests, and the tokens of each."""

    seconds: float
    cpu_seconds: float
    tokens: list[list[int]]


class Server:
    """A worker (see `peers.workers`), stopped with all its processes but within `serve`.

    Args:
        command, environment, folder: of the process.
        log: where its stderr goes.

    Raises:
        PeerGone: it ended before it was ready.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], folder: Path, log: Path
    ) -> None:
        self._log, began = log, time.perf_counter()
        with log.open("w") as file:
            self._process = subprocess.Popen(
                command, env=environment, cwd=folder, text=True, start_new_session=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file,
            )  # fmt: skip
        try:
            versions = self._answer()["versions"]
        except BaseException:
            self.close()
            raise
        self.started = Started(time.perf_counter() - began, self._cpu_seconds(), versions)
        groups.send(self._process.pid, signal.SIGSTOP)

    def serve(self, prompts: list[list[int]], new: list[int]) -> Served:
        """Greedy tokens of each prompt; raises `PeerGone`."""
        groups.send(self._process.pid, signal.SIGCONT)
        before = self._cpu_seconds()
        print(json.dumps({"prompts": prompts, "new": new}), file=self._process.stdin, flush=True)
        answer = self._answer()
        spent = self._cpu_seconds() - before
        groups.send(self._process.pid, signal.SIGSTOP)
        return Served(answer["seconds"], spent, answer["tokens"])

    @property
    def peak_bytes(self) -> int:
        """Resident memory until now, at its highest."""
        return groups.peak_bytes(self._process.pid)

    def close(self) -> None:
        """Ends it, and all that it has started; again does nothing."""
        groups.send(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _cpu_seconds(self) -> float:
        return groups.cpu_seconds(self._process.pid)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            answer: dict[str, Any] = json.loads(line)
            return answer
        code = self._process.wait()
        raise PeerGone(f"{_ended(code)}; {self._last_words()} (see {self._log})")

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").split("\n")
        errors = [line.strip() for line in lines if "Error" in line]
        return (errors or ["it said nothing"])[-1][-_LAST_WORDS:]


def _ended(code: int) -> str:
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
