"""Progress of a run: a live line on a terminal, else a line every few seconds."""

from __future__ import annotations

from typing import Self

from rich.console import Console

from compiled_attn.engine import StepInfo

__all__ = ["ServingView"]

_EVERY_S = 5.0


class ServingView:
    """Shows finished requests, speed, queue and blocks; called with each step.

    Args:
        requests: of the whole run.
        console: to print to.
    """

    def __init__(self, requests: int, console: Console) -> None:
        self._requests, self._console, self._next_s = requests, console, _EVERY_S
        self._live = console.status("serving") if console.is_terminal else None

    def __call__(self, step: StepInfo) -> None:
        """Shows a step; without a terminal only now and then."""
        if self._live is None and step.elapsed_s < self._next_s:
            return
        rate = step.generated_tokens / step.elapsed_s if step.elapsed_s > 0 else 0.0
        line = (
            f"{step.elapsed_s:.0f} s: {step.finished}/{self._requests} requests, "
            f"{rate:,.0f} tokens/s, {step.running} running, {step.waiting} waiting, "
            f"{step.blocks_used}/{step.blocks_total} blocks"
        )
        if self._live is not None:
            self._live.update(line)
            return
        self._next_s = step.elapsed_s + _EVERY_S
        self._console.print(line, highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
