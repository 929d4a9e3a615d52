"""Backend `aoti` with a memory: a package is built once, and later only loaded."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from graphs.backends.aoti import AotiBackend
from graphs.backends.base import CaptureError, Frozen
from graphs.inputs import Input
from graphs.store.errors import StoreError
from graphs.store.known import UNTOLD, KnownCode
from graphs.store.store import ArtifactStore

__all__ = ["StoredAoti"]

_log = logging.getLogger(__name__)


class StoredAoti:
    """Captures as backend `aoti` does, but loads what the store has, and stores what it lacks.

    Args:
        store: where packages are.

    Attributes:
        loaded: how many packages came from the store.
        stored: how many went to it.
    """

    name = "aoti"

    def __init__(self, store: ArtifactStore) -> None:
        self.store = store
        self.loaded = self.stored = 0
        self._code = KnownCode()
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
        factors = self._code.factors(function, example_inputs, backend="aoti", options=options)
        if factors is None:
            _log.warning("%s: not stored: %s", name, UNTOLD)
            return self._aoti.capture(
                function, example_inputs, name=name, warm_runs=warm_runs, options=options
            )
        frozen = self._load(factors, function, name)
        if frozen is None:
            with tempfile.TemporaryDirectory(prefix="graphs-store-") as folder:
                frozen = self._aoti.capture(
                    function,
                    example_inputs,
                    name=name,
                    warm_runs=warm_runs,
                    package_path=folder,
                    options=options,
                )
                self._put(factors, folder, name)
            return frozen
        try:
            for _ in range(warm_runs):
                frozen.run(*example_inputs)
        except Exception as error:
            raise CaptureError(name, str(error)) from error
        self.loaded += 1
        return frozen

    def _load(
        self, factors: Mapping[str, Any], function: Callable[..., Any], name: str
    ) -> Frozen | None:
        try:
            with self.store.use(factors) as folder:
                return self._aoti.load(function, folder, name=name) if folder else None
        except (CaptureError, StoreError, OSError) as error:
            _log.warning("%s: built again, not loaded: %s", name, error)
            return None

    def _put(self, factors: Mapping[str, Any], folder: str, name: str) -> None:
        try:
            self.stored += self.store.put(factors, folder)
        except StoreError as error:  # the graph works: only the next process has to build it again
            _log.warning("%s: not stored: %s", name, error)
