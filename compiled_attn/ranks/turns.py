"""A backend in which rank 0 compiles first, so that the others load from the cache."""

from __future__ import annotations

import itertools

from compiled_attn.ranks.group import Ranks
from graphs.capture.contract import Backend, Frozen, Job
from graphs.torch_internals.compiling import compiling_after
from graphs.torch_internals.events import at_compile_end

__all__ = ["RankZeroFirst"]

_TURNS = itertools.count()  # per process, because marks persist


class RankZeroFirst(Backend):
    """Wraps a backend so that rank 0 compiles each graph before the other ranks do.

    A graph contains collectives, so all ranks run it during capture and none can finish before the
    others. Only the compile waits, not the trace before it: the other ranks compile after rank 0,
    from inductor's cache.
    """

    def __init__(self, backend: Backend, ranks: Ranks) -> None:
        self.name, self.options = backend.name, backend.options
        self._backend, self._ranks = backend, ranks

    def available(self) -> str | None:
        """See `Backend`."""
        return self._backend.available()

    def capture(self, job: Job) -> Frozen:
        """Capture; the other ranks compile after rank 0."""
        turn = f"compiled {next(_TURNS)}"
        if not self._ranks.leads:
            with compiling_after(lambda: self._ranks.wait(turn)):
                return self._backend.capture(job)
        try:
            if self._backend.has(job):
                self._ranks.mark(turn)
            with at_compile_end(lambda: self._ranks.mark(turn)):
                return self._backend.capture(job)
        finally:
            self._ranks.mark(turn)

    def has(self, job: Job) -> bool:
        """See `Backend`."""
        return self._backend.has(job)

    def why_no_symbolic(self) -> str:
        """See `Backend`."""
        return self._backend.why_no_symbolic()
