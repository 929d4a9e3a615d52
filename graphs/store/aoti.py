"""Backend `aoti` with a store: a package is built once, and later only loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from graphs.backends.aoti import AotiBackend, load
from graphs.capture.contract import Frozen, Job
from graphs.capture.inputs import Input
from graphs.store.store import ArtifactStore
from graphs.store.stored import StoredBackend

__all__ = ["StoredAoti"]


class StoredAoti(StoredBackend):
    """Captures as backend `aoti` does, but loads what the store has, and stores what it lacks.

    Arguments and attributes: see :class:`~graphs.store.stored.StoredBackend`.
    """

    name = "aoti"

    def __init__(self, store: ArtifactStore) -> None:
        super().__init__(store, load)
        self._aoti = AotiBackend()

    def available(self) -> str | None:
        """Needs what backend `aoti` needs."""
        return self._aoti.available()

    def capture(
        self,
        function: Callable[..., Any],
        example_inputs: Sequence[Input],
        *,
        name: str,
        warm_runs: int,
        options: Mapping[str, Any] | None = None,
    ) -> Frozen:
        """Load the package, or build it and store it; `options` are those of the backend."""
        job = Job(function, example_inputs, name, warm_runs, options=options)

        def make(folder: Path | None) -> tuple[Frozen, Callable[[], object]]:
            settings: dict[str, Any] = {"name": name, "warm_runs": warm_runs, "options": options}
            frozen = self._aoti.capture(function, example_inputs, package_path=folder, **settings)
            return frozen, lambda: None  # it is in its folder already

        factors = self.factors(job)
        if isinstance(factors, str):
            self.not_stored(name, factors)
            return make(None)[0]
        return self.load_or_store(job, factors, make)
