"""The systems that are compared, started; one that fails is left out with its reason."""

from __future__ import annotations

import shutil
import sys
from types import TracebackType

from peers.servers import PeerGone, Served, Server, Started
from peers.systems import System, Task


class Contest:
    """Servers of a task by name, of which one runs at a time. Leaving the context stops all.

    Attributes:
        servers: those that serve.
        gone: why the others do not.
        cold: starts with empty caches.
        second: the starts after these, or after an earlier contest.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.servers: dict[str, Server] = {}
        self.gone: dict[str, str] = {}
        self.cold: dict[str, Started] = {}
        self.second: dict[str, Started] = {}

    def __enter__(self) -> Contest:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        where: TracebackType | None,
    ) -> None:  # fmt: skip
        for server in self.servers.values():
            server.close()

    def start(self, system: System, is_warm: bool) -> None:
        """Start it with empty caches (unless ``is_warm``), stop it, and start it to serve."""
        name = system.name
        try:
            if not is_warm:
                shutil.rmtree(system.state(self.task), ignore_errors=True)
                first = self._started(system, "cold")
                self.cold[name] = first.started
                first.close()
            self.servers[name] = self._started(system, "second")
            self.second[name] = self.servers[name].started
        except PeerGone as error:
            self.gone[name] = str(error)

    def serve(self, name: str, prompts: list[list[int]], new: list[int]) -> Served | None:
        """Tokens of that system and their cost; None if it is gone."""
        if name not in self.servers:
            return None
        try:
            return self.servers[name].serve(prompts, new)
        except PeerGone as error:
            self.servers.pop(name).close()
            self.gone[name] = str(error)
            return None

    def _started(self, system: System, which: str) -> Server:
        server = system.start(self.task)
        seconds = server.started.seconds
        print(f"# {system.name}, {which} start: {seconds:.1f} s", file=sys.stderr, flush=True)
        return server
