"""The callable itself: what every other backend is compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from graphs.capture.contract import Backend, Frozen
from graphs.capture.inputs import Input
from graphs.errors import CaptureError

__all__ = ["EagerBackend"]


class EagerBackend(Backend):
    """Runs the callable as it is, behind the same checks as a compiled graph."""

    name = "eager"

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
