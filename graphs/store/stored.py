"""Backends with a store: load a graph that was stored, else capture it and store it."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

from torch import nn

from graphs.backends.aoti import AotiBackend, load
from graphs.capture.contract import Backend, Frozen, Job
from graphs.errors import CaptureError
from graphs.store.factors import graph_factors
from graphs.store.misses import Misses
from graphs.store.sources import CodeDigests
from graphs.store.store import ArtifactStore
from graphs.watch.causes import describe_failure

__all__ = ["Make", "StoredAoti", "StoredBackend"]

Make: TypeAlias = Callable[[Path], tuple[Frozen, Callable[[], object]]]
"""Captures a graph into a folder, and returns it with a function that finishes writing it."""

_log = logging.getLogger(__name__)
_NO_UUID = (
    "an option or a custom pass is an object without uuid(), so its effect cannot be recorded: add "
    "that method"
)


class StoredBackend(Backend):
    """Base of backends that store their graphs.

    Args:
        store: holds the graphs.
        read: reads the graph of a callable from a folder of the store, without compiling or running
            anything.

    Attributes:
        loaded: number of graphs that came from the store.
        stored: number of graphs that were added to it.
        misses: the graphs that it did not have, each with the reason; a reason is logged once.
    """

    def __init__(
        self, store: ArtifactStore, read: Callable[[Path, Callable[..., Any]], Frozen]
    ) -> None:
        self.store = store
        self._read = read
        self.loaded = self.stored = 0
        self.misses = Misses()
        self._digests = CodeDigests()

    def warming_up(self) -> AbstractContextManager[object]:
        """Read source files and globals once for all captures in it."""
        return self._digests.reading_once()

    def factors(self, job: Job) -> dict[str, Any] | str:
        """Everything that a graph depends on, or why it cannot be stored."""
        try:
            factors = graph_factors(
                job.function,
                job.examples,
                backend=self.name,
                options=job.options["options"] or {},
                dims=job.dims,
                digests=self._digests,
            )
        except Exception as error:  # such as a torch that has its settings elsewhere
            return f"cannot compute the cache key: {describe_failure(error)}"
        return _NO_UUID if factors is None else factors

    def load_or_store(self, job: Job, factors: Mapping[str, Any], make: Make) -> Frozen:
        """Load the graph of these factors and run it on the examples, else capture and store it.

        A stored graph that fails on the examples, for example because the driver rejects its
        kernels, is captured again.
        """
        frozen = self.find(job, factors)
        if frozen is not None and self.runs(frozen, job):
            return frozen
        return self.capture_and_store(job, factors, make)

    def runs(self, frozen: Frozen, job: Job) -> bool:
        """Whether a graph from the store runs on the examples; logs the reason if it does not."""
        try:
            job.warm_up(frozen)
        except CaptureError as error:
            _log.warning("compiling again, the loaded graph fails: %s", error)
            return False
        finally:
            self._digests.ignore_changes()
        self.loaded += 1
        return True

    def capture_and_store(self, job: Job, factors: Mapping[str, Any], make: Make) -> Frozen:
        """Capture a graph and store it; a failure to store is only logged, as the graph works."""
        with tempfile.TemporaryDirectory(
            prefix="graphs-store-", ignore_cleanup_errors=True
        ) as folder:
            frozen, write = make(Path(folder))
            self._digests.ignore_changes()
            about = {"model": _model(job.function), "name": job.graph_name}
            try:
                write()
                self.stored += self.store.put(factors, folder, about=about)
            except Exception as error:
                self.warn_not_stored(job.graph_name, describe_failure(error))
        return frozen

    def warn_not_stored(self, name: str, reason: str) -> None:
        """Log why the next process has to capture a graph again."""
        _log.warning("%s: not stored: %s", name, reason)

    def find(self, job: Job, factors: Mapping[str, Any]) -> Frozen | None:
        """Read the graph of these factors; None if there is none, with the reason logged."""
        try:
            is_there = self.store.has(factors)
            with self.store.use(factors) as folder:
                if folder:
                    return self._read(folder, job.function)
            if not is_there:  # a damaged entry was discarded and logged already
                self.misses.note(self.store, factors, job.graph_name)
        except Exception as error:  # the store is busy or gone, or torch cannot read the graph
            problem = describe_failure(error)
            _log.warning("%s: compiling again, not loaded: %s", job.graph_name, problem)
        return None


class StoredAoti(StoredBackend):
    """Backend `aoti` with a store: builds a package once, later processes load it.

    Arguments and attributes: see :class:`StoredBackend`.
    """

    name = AotiBackend.name
    options = MappingProxyType({"options": None})

    def __init__(self, store: ArtifactStore) -> None:
        super().__init__(store, load)
        self._aoti = AotiBackend()

    def available(self) -> str | None:
        """Needs what backend `aoti` needs."""
        return self._aoti.available()

    def capture(self, job: Job) -> Frozen:
        """Load the package, or build it and store it."""

        def make(folder: Path | None) -> tuple[Frozen, Callable[[], object]]:
            options = {**job.options, "package_path": folder}
            frozen = self._aoti.capture(job.with_spec(backend=self._aoti, options=options))
            return frozen, lambda: None  # the package is in its folder already

        factors = self.factors(job)
        if isinstance(factors, str):
            self.warn_not_stored(job.name, factors)
            return make(None)[0]
        return self.load_or_store(job, factors, make)


def _model(function: Callable[..., Any]) -> str:
    """A label for people: the class of a module and its number of parameters."""
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
