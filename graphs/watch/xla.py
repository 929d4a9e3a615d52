"""A sentinel for XLA: how often it compiled, after its own counters.

XLA compiles behind Dynamo's back, when a traced step is executed. `torch_xla` counts that, and
tells nobody before, so a compile is seen when it is done.
"""

from __future__ import annotations

import importlib
import logging
import threading
from typing import TYPE_CHECKING, Any, Protocol

from graphs.errors import GraphBudgetExceeded
from graphs.watch.events import CompileEvent

if TYPE_CHECKING:
    from typing import Self

__all__ = ["XlaMetrics", "no_xla_compile"]

_log = logging.getLogger(__name__)

_METRIC = "CompileTime"
_REMEDY = "run this case once in the warmup; PT_XLA_DEBUG_LEVEL=2 prints the line that executes it"


class XlaMetrics(Protocol):
    """What is asked of `torch_xla.debug.metrics`."""

    def metric_data(self, name: str) -> Any:
        """``(samples, nanoseconds in all, the last samples)``, or None where there is none yet."""


class no_xla_compile:
    """Context manager like :class:`graphs.no_compile`, for what XLA compiles.

        warm_up()
        with no_xla_compile():
            serve()

    Args:
        strict: True raises :class:`GraphBudgetExceeded` at the end, or from :meth:`check`, if
            anything compiled; False counts it and logs a warning.
        metrics: `torch_xla.debug.metrics`; None: imported when it is armed.

    Attributes:
        events: one for each time at which compiles were seen. XLA does not say what it compiled, so
            they have no file and line.
        compiles: how many there were.

    Counted is the whole process: XLA's counters know no threads.
    """

    def __init__(self, strict: bool = True, *, metrics: XlaMetrics | None = None) -> None:
        self.strict = strict
        self._metrics = metrics
        self._events: list[CompileEvent] = []
        self._seen: tuple[int, float] | None = None
        self._compiles = 0

    @property
    def events(self) -> tuple[CompileEvent, ...]:
        """Everything seen so far, also after the end."""
        return tuple(self._events)

    @property
    def compiles(self) -> int:
        """How many graphs XLA compiled."""
        return self._compiles

    def arm(self) -> Self:
        """Begin to count; returns itself.

        Raises:
            ModuleNotFoundError: `torch_xla` is not installed.
            ValueError: its counter is not what this was written for.
        """
        if self._metrics is None:
            self._metrics = importlib.import_module("torch_xla.debug.metrics")
        self._seen = self._count()
        return self

    def check(self) -> None:
        """Count what compiled since the last look.

        Raises:
            GraphBudgetExceeded: something did, and it is strict.
        """
        if self._seen is None:
            return
        before, self._seen = self._seen, self._count()
        # Somebody who clears the metrics sets them back to 0: what is there came after that.
        new = self._seen[0] - before[0] if self._seen[0] >= before[0] else self._seen[0]
        if not new:
            return
        self._compiles += new
        seconds = self._seen[1] - (before[1] if self._seen[1] >= before[1] else 0.0)
        event = _event(new, seconds)
        self._events.append(event)
        if self.strict:
            raise GraphBudgetExceeded(event)
        _log.warning("after warmup: %s; %s", event, event.remedy)

    def disarm(self) -> None:
        """Stop counting, without a last look. May be called twice."""
        self._seen = None

    def __enter__(self) -> Self:
        return self.arm()

    def __exit__(self, kind: object, *exc_info: object) -> None:
        try:
            if kind is None:  # what ended the body comes first
                self.check()
        finally:
            self.disarm()

    def _count(self) -> tuple[int, float]:
        assert self._metrics is not None
        data = self._metrics.metric_data(_METRIC)
        try:
            return (0, 0.0) if data is None else (int(data[0]), float(data[1]) / 1e9)
        except (TypeError, ValueError, LookupError):
            raise ValueError(
                f"expected (samples, nanoseconds, ...) of torch_xla's metric_data({_METRIC!r}), "
                f"got {data!r:.60}: install a version that counts so"
            ) from None


def _event(count: int, seconds: float) -> CompileEvent:
    what = f"{count} XLA graph{'s' if count > 1 else ''}"
    reason = f"the counter {_METRIC} rose by {count}, {seconds:.2f} s"
    return CompileEvent("compile", what, "", 0, reason, threading.get_ident(), _REMEDY)
