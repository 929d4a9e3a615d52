"""The base of backends with a store: load what is there, store what is not."""

from __future__ import annotations

import logging
import tempfile
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch import nn

from graphs.backends.export_state import why_stale
from graphs.capture.contract import Backend, Frozen
from graphs.capture.inputs import Input
from graphs.capture.symbolic import warmed
from graphs.errors import CaptureError
from graphs.store.factors import code_factors, graph_factors
from graphs.store.misses import Misses
from graphs.store.store import ArtifactStore
from graphs.watch.causes import describe_failure

__all__ = ["StoredBackend"]

_Read = TypeVar("_Read")

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
        # A capture imports modules and so changes which files can be reached: what counts is what a
        # process finds before its first capture of a callable.
        self._code: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()

    @abstractmethod
    def read(self, folder: Path, function: Callable[..., Any]) -> Callable[..., Any]:
        """The graph of a callable out of a folder of the store; compiles and runs nothing."""

    def factors(
        self,
        function: Callable[..., Any],
        examples: Sequence[Input],
        options: Mapping[str, Any] | None,
        dims: Sequence[Sequence[int]] = (),
    ) -> dict[str, Any] | str:
        """Everything that a graph depends on, or why it cannot be stored.

        `dims` are the dimensions of each example that symbols stand for.
        """
        try:
            factors = graph_factors(
                function,
                examples,
                backend=self.name,
                options=options or {},
                code=self._code_of(function),
                dims=dims,
            )
        except Exception as error:  # a source that is gone, a torch that has its settings elsewhere
            return f"what it depends on cannot be told: {describe_failure(error)}"
        return _UNTOLD if factors is None else factors

    def _code_of(self, function: Callable[..., Any]) -> dict[str, Any] | None:
        with suppress(TypeError):  # it has no hash, or cannot be referred to weakly
            if function not in self._code:
                self._code[function] = code_factors(function, self.name)
            return self._code[function]
        return None

    def load_or_store(
        self,
        factors: Mapping[str, Any],
        function: Callable[..., Any],
        examples: Sequence[Input],
        make: Callable[[Path], tuple[Frozen, Callable[[], object]]],
        *,
        name: str,
        warm_runs: int,
    ) -> Frozen:
        """The graph of these factors out of the store, run `warm_runs` times; or else made, stored.

        Args:
            make: captures the graph, and returns also what puts it into the folder that it is
                given. What fails in storing is only logged, as the graph works.

        A graph that was stored and fails on the examples, such as one whose kernels the device's
        driver does not take, is made again.
        """
        run = self.found(factors, name, lambda folder: self.read(folder, function))
        if run is not None:
            frozen = Frozen(run, stale=why_stale, is_loaded=True)
            if self.runs(frozen, examples, name, warm_runs):
                return frozen
        return self.store_made(factors, function, make, name)

    def runs(self, frozen: Frozen, examples: Sequence[Input], name: str, count: int) -> bool:
        """Whether a graph out of the store runs, `count` times; why it does not is logged."""
        try:
            warmed(frozen, examples, name, count)
        except CaptureError as error:
            _log.warning("compiled again, as what was loaded fails: %s", error)
            return False
        self.loaded += 1
        return True

    def store_made(
        self,
        factors: Mapping[str, Any],
        function: Callable[..., Any],
        make: Callable[[Path], tuple[Frozen, Callable[[], object]]],
        name: str,
    ) -> Frozen:
        """Make a graph and store it; `make` as for :meth:`load_or_store`."""
        with tempfile.TemporaryDirectory(
            prefix="graphs-store-", ignore_cleanup_errors=True
        ) as folder:
            frozen, write = make(Path(folder))
            about = {"model": _model(function), "name": name}
            try:
                write()
                self.stored += self.store.put(factors, folder, about=about)
            except Exception as error:
                self.not_stored(name, describe_failure(error))
        return frozen

    def not_stored(self, name: str, reason: str) -> None:
        """Log that the next process has to make a graph again, and why."""
        _log.warning("%s: not stored: %s", name, reason)

    def found(
        self, factors: Mapping[str, Any], name: str, read: Callable[[Path], _Read]
    ) -> _Read | None:
        """What is read from the entry of these factors, or None; a miss or a damage is told."""
        try:
            is_there = self.store.has(factors)
            with self.store.use(factors) as folder:
                if folder:
                    return read(folder)
            if not is_there:  # or else it was thrown away, which was logged
                self.misses.note(self.store, factors, name)
        except Exception as error:  # a store that is busy or gone, a torch that cannot read it
            _log.warning("%s: compiled again, not loaded: %s", name, describe_failure(error))
        return None


def _model(function: Callable[..., Any]) -> str:
    """A callable for people: a module's class, and how many parameters it has."""
    if not isinstance(function, nn.Module):
        return getattr(function, "__name__", type(function).__qualname__)
    count = _parameters(function)
    around = [child for child in function.children() if count and _parameters(child) == count]
    of = f" of {type(around[0]).__qualname__}" if len(around) == 1 else ""
    return f"{type(function).__qualname__}{of}, {_short(count)} parameters"


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _short(count: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)
