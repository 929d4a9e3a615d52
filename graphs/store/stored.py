"""The base of backends with a store: load what is there, store what is not."""

from __future__ import annotations

import logging
import tempfile
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from graphs.backends.export_state import why_stale
from graphs.capture.contract import Backend, Frozen
from graphs.capture.inputs import Input
from graphs.errors import CaptureError
from graphs.store.factors import GraphFactors
from graphs.store.label import describe
from graphs.store.misses import Misses
from graphs.store.store import ArtifactStore
from graphs.watch.causes import describe_failure

__all__ = ["StoredBackend"]

_log = logging.getLogger(__name__)
_UNTOLD = "an option is an object without a uuid(), so what it does cannot be recorded: give it one"


class StoredBackend(Backend):
    """A backend that keeps its graphs in a store.

    Args:
        store: where graphs are.

    Attributes:
        loaded: how many graphs came from the store.
        stored: how many went to it.
        misses: the graphs that it did not have, each with the reason; a reason is logged once.
    """

    def __init__(self, store: ArtifactStore) -> None:
        self.store = store
        self.loaded = self.stored = 0
        self.misses = Misses()
        self._graph_factors = GraphFactors(self.name)

    @abstractmethod
    def read(self, folder: Path, function: Callable[..., Any]) -> Callable[..., Any]:
        """The graph of a callable out of a folder of the store; compiles and runs nothing."""

    def factors(
        self,
        function: Callable[..., Any],
        examples: Sequence[Input],
        options: Mapping[str, Any] | None,
    ) -> dict[str, Any] | str:
        """Everything that a graph depends on, or why it cannot be stored."""
        factors = self._graph_factors.of(function, examples, options or {})
        return _UNTOLD if factors is None else factors

    def restore(
        self,
        factors: Mapping[str, Any],
        function: Callable[..., Any],
        examples: Sequence[Input],
        *,
        name: str,
        warm_runs: int,
    ) -> Frozen | None:
        """The graph of these factors, run `warm_runs` times; None where it has to be made.

        Raises:
            CaptureError: the graph that was stored fails on the examples.
        """
        try:
            is_there = self.store.has(factors)
            with self.store.use(factors) as folder:
                run = self.read(folder, function) if folder else None
            if run is None:
                if not is_there:  # or else it was thrown away, which was logged
                    self.misses.note(self.store, factors, name)
                return None
        except Exception as error:  # a store that is busy or gone, a torch that cannot read it
            _log.warning("%s: compiled again, not loaded: %s", name, describe_failure(error))
            return None
        try:
            for _ in range(warm_runs):
                run(*examples)
        except Exception as error:
            raise CaptureError(name, describe_failure(error)) from error
        self.loaded += 1
        return Frozen(run, stale=why_stale, is_loaded=True)

    def keep(
        self,
        factors: Mapping[str, Any],
        function: Callable[..., Any],
        write: Callable[[Path], object],
        *,
        name: str,
    ) -> None:
        """Store what `write` puts into a folder; what fails is only logged, as the graph works."""
        try:
            with tempfile.TemporaryDirectory(prefix="graphs-store-") as folder:
                write(Path(folder))
                self.stored += self.store.put(factors, folder, about=describe(function, name))
        except Exception as error:
            self.not_stored(name, describe_failure(error))

    def not_stored(self, name: str, reason: str) -> None:
        """Log that the next process has to make a graph again, and why."""
        _log.warning("%s: not stored: %s", name, reason)
