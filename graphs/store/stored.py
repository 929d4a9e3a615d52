"""The base of backends with a store: load what is there, store what is not."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

from torch import nn

from graphs.capture.contract import Backend, Frozen, Job
from graphs.errors import CaptureError
from graphs.store.factors import code_factors, graph_factors
from graphs.store.known_imports import KnownImports
from graphs.store.misses import Misses
from graphs.store.store import ArtifactStore
from graphs.watch.causes import describe_failure

__all__ = ["Make", "StoredBackend"]

Make: TypeAlias = Callable[[Path], tuple[Frozen, Callable[[], object]]]
"""Captures a graph, and returns also what puts it into the folder that it is given."""

_log = logging.getLogger(__name__)
_UNTOLD = "an option is an object without a uuid(), so what it does cannot be recorded: give it one"


class StoredBackend(Backend):
    """A backend that keeps its graphs in a store.

    Args:
        store: where graphs are.
        read: reads the graph of a callable out of a folder of the store; compiles and runs nothing.

    Attributes:
        loaded: how many graphs came from the store.
        stored: how many went to it.
        misses: the graphs that it did not have, each with the reason; a reason is logged once.
    """

    def __init__(
        self, store: ArtifactStore, read: Callable[[Path, Callable[..., Any]], Frozen]
    ) -> None:
        self.store = store
        self._read = read
        self.loaded = self.stored = 0
        self.misses = Misses()
        # A capture imports modules and so changes which files can be reached: what counts is what a
        # process finds before its first capture of a callable.
        self._code: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()
        self._imports = KnownImports(store.path)

    def factors(self, job: Job) -> dict[str, Any] | str:
        """Everything that a graph depends on, or why it cannot be stored."""
        try:
            factors = graph_factors(
                job.function,
                job.examples,
                backend=self.name,
                options=job.options["options"] or {},
                code=self._code_of(job.function),
                dims=job.dims,
            )
        except Exception as error:  # a source that is gone, a torch that has its settings elsewhere
            return f"what it depends on cannot be told: {describe_failure(error)}"
        return _UNTOLD if factors is None else factors

    def _code_of(self, function: Callable[..., Any]) -> dict[str, Any]:
        try:
            known = self._code.get(function)
        except TypeError:  # it has no hash, or cannot be referred to weakly
            return self._code_now(function)
        if known is None:
            known = self._code[function] = self._code_now(function)
        return known

    def _code_now(self, function: Callable[..., Any]) -> dict[str, Any]:
        found = code_factors(function, self.name, self._imports.read)
        self._imports.keep()
        return found

    def load_or_store(self, job: Job, factors: Mapping[str, Any], make: Make) -> Frozen:
        """The graph of these factors from the store, run on the examples; or made, and stored.

        A graph that was stored and fails on the examples, such as one whose kernels the device's
        driver does not take, is made again.
        """
        frozen = self.found(job, factors)
        if frozen is not None and self.runs(frozen, job):
            return frozen
        return self.store_made(job, factors, make)

    def runs(self, frozen: Frozen, job: Job) -> bool:
        """Whether a graph from the store runs on the examples; why it does not is logged."""
        try:
            job.warm_up(frozen)
        except CaptureError as error:
            _log.warning("compiled again, as what was loaded fails: %s", error)
            return False
        self.loaded += 1
        return True

    def store_made(self, job: Job, factors: Mapping[str, Any], make: Make) -> Frozen:
        """Make a graph and store it; what fails in storing is only logged, as the graph works."""
        with tempfile.TemporaryDirectory(
            prefix="graphs-store-", ignore_cleanup_errors=True
        ) as folder:
            frozen, write = make(Path(folder))
            about = {"model": _model(job.function), "name": job.graph_name}
            try:
                write()
                self.stored += self.store.put(factors, folder, about=about)
            except Exception as error:
                self.not_stored(job.graph_name, describe_failure(error))
        return frozen

    def not_stored(self, name: str, reason: str) -> None:
        """Log that the next process has to make a graph again, and why."""
        _log.warning("%s: not stored: %s", name, reason)

    def found(self, job: Job, factors: Mapping[str, Any]) -> Frozen | None:
        """The graph that the entry of these factors holds, or None, with the reason logged."""
        try:
            is_there = self.store.has(factors)
            with self.store.use(factors) as folder:
                if folder:
                    return self._read(folder, job.function)
            if not is_there:  # or else it was thrown away, which was logged
                self.misses.note(self.store, factors, job.graph_name)
        except Exception as error:  # a store that is busy or gone, a torch that cannot read it
            problem = describe_failure(error)
            _log.warning("%s: compiled again, not loaded: %s", job.graph_name, problem)
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
