"""Compiles grammars for waiting clients, off the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from compiled_attn.engine import Grammar
from compiled_attn.errors import QueueFull

__all__ = ["GrammarQueue"]

_MAX_JOBS, _MAX_PER_CLIENT = 16, 4
_MAX_ABANDONED = 2
"""Compilations that may run without a client. xgrammar cannot be interrupted: one whose clients
have gone runs on, and the next one starts concurrently."""


@dataclass(eq=False)
class _Job:
    grammar: Grammar
    done: asyncio.Future[Any]
    clients: Counter[str] = field(default_factory=Counter)
    is_running: bool = False

    @property
    def is_wanted(self) -> bool:
        return self.clients.total() > 0


class GrammarQueue:
    """Compiles one grammar at a time, first come first served; for one event loop.

    A job is dropped with the last client that waits for it. ``compile_grammar`` is called in a
    thread of its own.
    """

    def __init__(self, compile_grammar: Callable[[Grammar], Any]) -> None:
        self._compile = compile_grammar
        self._jobs: dict[Grammar, _Job] = {}

    @property
    def is_idle(self) -> bool:
        """Whether no thread compiles."""
        return not any(job.is_running for job in self._jobs.values())

    async def compiled(self, grammar: Grammar, client: str) -> Any:
        """Returns the compiled grammar; cancelled, it gives up its place in the queue.

        Raises:
            QueueFull: too many grammars wait, or too many of this client, such as an address.
            ConfigError: the grammar is refused.
        """
        job = self._job(grammar, client)
        job.clients[client] += 1
        self._start_next()
        try:
            return await asyncio.shield(job.done)
        finally:
            job.clients[client] -= 1
            if not job.is_wanted and not job.is_running and self._jobs.get(grammar) is job:
                del self._jobs[grammar]
            self._start_next()

    def _job(self, grammar: Grammar, client: str) -> _Job:
        job = self._jobs.get(grammar)
        own = sum(each.clients[client] > 0 for each in self._jobs.values() if each is not job)
        limit = f"{_MAX_PER_CLIENT} grammars of a client" if own >= _MAX_PER_CLIENT else ""
        if job is None and len(self._jobs) >= _MAX_JOBS:
            limit = limit or f"{_MAX_JOBS} grammars"
        if limit:
            raise QueueFull(
                f"expected at most {limit} that wait to be compiled, got one more: submit it later"
            )
        if job is None:
            done = asyncio.get_running_loop().create_future()
            job = self._jobs[grammar] = _Job(grammar, done)
        return job

    def _start_next(self) -> None:
        running = [job for job in self._jobs.values() if job.is_running]
        if any(job.is_wanted for job in running) or len(running) > _MAX_ABANDONED:
            return
        if (job := next((job for job in self._jobs.values() if not job.is_running), None)) is None:
            return
        job.is_running = True
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._run, args=(job, loop), name="grammar", daemon=True).start()

    def _run(self, job: _Job, loop: asyncio.AbstractEventLoop) -> None:
        made, error = None, None
        try:
            made = self._compile(job.grammar)
        except Exception as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(self._finish, job, made, error)

    def _finish(self, job: _Job, made: Any, error: Exception | None) -> None:
        del self._jobs[job.grammar]
        if error is None:
            job.done.set_result(made)
        elif job.is_wanted:
            job.done.set_exception(error)
        self._start_next()
