"""A backend whose graphs rank 0 compiles first, so that the others find them compiled."""

from __future__ import annotations

import itertools

from compiled_attn.ranks.group import Ranks
from graphs.capture.contract import Backend, Frozen, Job
from graphs.torch_internals.compiling import compiling_after
from graphs.torch_internals.events import at_compile_end

__all__ = ["InTurn"]

_TURNS = itertools.count()  # of all engines of the process, as marks stay


class InTurn(Backend):
    """A backend of several ranks, of which one compiles at a time.

    A graph contains sums over the ranks, so all of them run it in a capture, and none can be done
    before the others. What waits is the compile, and not the trace before it: the other ranks begin
    theirs when that of rank 0 has ended, and it is then a look into inductor's cache. A store has
    the graph at the next start.

    Args:
        backend: what captures.
        ranks: who takes part.
    """

    def __init__(self, backend: Backend, ranks: Ranks) -> None:
        self.name, self.options = backend.name, backend.options
        self._backend, self._ranks = backend, ranks

    def available(self) -> str | None:
        """As the backend's."""
        return self._backend.available()

    def capture(self, job: Job) -> Frozen:
        """Capture; rank 0 tells when it has compiled, the others compile when it did."""
        turn = f"compiled {next(_TURNS)}"
        if not self._ranks.leads:
            with compiling_after(lambda: self._ranks.wait(turn)):
                return self._backend.capture(job)
        try:
            if self._backend.has(job):  # it may lack elsewhere
                self._ranks.mark(turn)
            with at_compile_end(lambda: self._ranks.mark(turn)):
                return self._backend.capture(job)
        finally:
            self._ranks.mark(turn)

    def has(self, job: Job) -> bool:
        """As the backend's."""
        return self._backend.has(job)

    def why_no_symbolic(self) -> str:
        """As the backend's."""
        return self._backend.why_no_symbolic()

    def why_no_precompile(self) -> str:
        """Workers of several ranks would compile the same."""
        return "of several ranks one compiles at a time"
