"""Backend `aoti` with a memory: a package is built once, and later only loaded."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from graphs.backends.aoti import AotiBackend
from graphs.capture.contract import CaptureError, Frozen
from graphs.capture.inputs import Input
from graphs.store.errors import StoreError
from graphs.store.known import UNTOLD, KnownCode
from graphs.store.label import describe
from graphs.store.misses import Misses
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
        misses: the graphs that it did not have, each with the reason; a reason is logged once.
    """

    name = "aoti"

    def __init__(self, store: ArtifactStore) -> None:
        self.store = store
        self.loaded = self.stored = 0
        self.misses = Misses()
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
                self._put(factors, folder, describe(function, name))
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
            is_there = self.store.has(factors)
            with self.store.use(factors) as folder:
                if folder:
                    return self._aoti.load(function, folder, name=name)
            if not is_there:  # or else it was thrown away, which was told
                self.misses.note(self.store, factors, name)
            return None
        except (CaptureError, StoreError, OSError) as error:
            _log.warning("%s: built again, not loaded: %s", name, error)
            return None

    def _put(self, factors: Mapping[str, Any], folder: str, about: Mapping[str, str]) -> None:
        try:
            self.stored += self.store.put(factors, folder, about=about)
        except StoreError as error:  # the graph works: only the next process has to build it again
            _log.warning("%s: not stored: %s", about["name"], error)
