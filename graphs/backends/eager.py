"""The callable itself: what every other backend is compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from graphs.capture.contract import Backend, Frozen
from graphs.capture.inputs import Input

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
        return Frozen(function).warmed(example_inputs, name, warm_runs)
