"""The callable itself: what every other backend is compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from graphs.capture.contract import CaptureError, Frozen
from graphs.capture.inputs import Input

__all__ = ["EagerBackend"]


class EagerBackend:
    """Runs the callable as it is, behind the same checks as a compiled graph."""

    name = "eager"

    def available(self) -> str | None:
        """Eager is always there."""
        return None

    def capture(
        self,
        function: Callable[..., Any],
        example_inputs: Sequence[Input],
        *,
        name: str,
        warm_runs: int,
    ) -> Frozen:
        """Run the callable `warm_runs` times, so that an error shows now."""
        try:
            for _ in range(warm_runs):
                function(*example_inputs)
        except Exception as error:
            raise CaptureError(name, f"{type(error).__name__}: {error}") from error
        return Frozen(function)
