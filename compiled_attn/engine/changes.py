"""Changes that happen or do not, whatever interrupts them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

from compiled_attn.engine.outcome import Outcome

__all__ = ["Attempt", "Changes"]


@dataclass(slots=True)
class Attempt:
    """A change that has begun; with an outcome it is a step that was done."""

    outcome: Outcome | None = None


class Changes:
    """Runs changes of requests and blocks one at a time, and mends what an exception tore.

    Args:
        recover: given the outcome of the step that was done, or None; makes everything whole. It
            is called again if it was itself interrupted, so a second call must do no harm.
    """

    def __init__(self, recover: Callable[[Outcome | None], None]) -> None:
        self._recover = recover
        self._attempt: Attempt | None = None
        self._frame: FrameType | None = None

    @property
    def is_running(self) -> bool:
        """Whether a change is being made: by another thread, or by a caller of this call."""
        # The call itself, looked for on the stacks: a flag or a lock can be left set.
        frame = self._frame
        return frame is not None and _is_executing(frame)

    def refuse_second(self) -> None:
        """Raises RuntimeError while a change is being made."""
        if self.is_running:
            raise RuntimeError(
                "expected an engine that is not at work, got a call from within a step, or from "
                "another thread: let one thread step it"
            )

    def run(self, change: Callable[[Attempt], None]) -> None:
        """Makes a change; interrupted, it was done or is undone."""
        self._attempt = attempt = Attempt()
        self._frame = sys._getframe()
        try:
            change(attempt)
            self._attempt = None
        except BaseException:
            self.finish()
            raise
        self._frame = None

    def finish(self, *, is_whole: bool = True) -> None:
        """Recovers from what an exception left behind; ``is_whole`` False: in any case."""
        attempt = self._attempt
        if attempt is not None or not is_whole:
            self._recover(attempt.outcome if attempt else None)
            self._attempt = None


def _is_executing(frame: FrameType) -> bool:
    for top in sys._current_frames().values():
        caller: FrameType | None = top
        while caller is not None and caller is not frame:
            caller = caller.f_back
        if caller is frame:
            return True
    return False
