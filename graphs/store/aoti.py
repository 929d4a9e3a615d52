"""Backend `aoti` with a store: a package is built once, and later only loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType

from graphs.backends.aoti import AotiBackend, load
from graphs.capture.contract import Frozen, Job
from graphs.store.store import ArtifactStore
from graphs.store.stored import StoredBackend

__all__ = ["StoredAoti"]


class StoredAoti(StoredBackend):
    """Captures as backend `aoti` does, but loads what the store has, and stores what it lacks.

    Arguments and attributes: see :class:`~graphs.store.stored.StoredBackend`.
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
            return frozen, lambda: None  # it is in its folder already

        factors = self.factors(job)
        if isinstance(factors, str):
            self.not_stored(job.name, factors)
            return make(None)[0]
        return self.load_or_store(job, factors, make)
