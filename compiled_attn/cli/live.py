"""Progress of a run: a live line on a terminal, else a line every few seconds."""

from __future__ import annotations

from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from compiled_attn.engine import StepInfo

__all__ = ["LiveServingView", "ServingView", "serving_view", "status_line"]


def status_line(step: StepInfo) -> str:
    """Formats tokens per second, running, waiting and blocks in use."""
    rate = step.generated_tokens / step.elapsed_s if step.elapsed_s > 0 else 0.0
    return (
        f"{rate:,.0f} tokens/s, {step.running} running, {step.waiting} waiting, "
        f"{step.blocks_used}/{step.blocks_total} blocks"
    )


class ServingView:
    """Prints a line every ``every_s`` seconds; called with each step.

    Args:
        requests: of the whole run.
        console: to print to.
        every_s: seconds between two lines.
    """

    def __init__(self, requests: int, console: Console, every_s: float = 5.0) -> None:
        self._requests = requests
        self._console = console
        self._every_s = self._next_s = every_s

    def __call__(self, step: StepInfo) -> None:
        """Shows a step, if it is time to."""
        if step.elapsed_s < self._next_s:
            return
        self._next_s = step.elapsed_s + self._every_s
        done = f"{step.elapsed_s:.0f} s: {step.finished}/{self._requests} requests"
        self._console.print(f"{done}, {status_line(step)}", highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class LiveServingView(ServingView):
    """Updates one line of the terminal while the context is open."""

    def __init__(self, requests: int, console: Console) -> None:
        super().__init__(requests, console)
        self._progress = Progress(
            TextColumn("serving"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[status]}"),
            console=console,
        )
        self._task = self._progress.add_task("serving", total=requests, status="")

    def __call__(self, step: StepInfo) -> None:
        """Shows a step."""
        self._progress.update(self._task, completed=step.finished, status=status_line(step))

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


def serving_view(requests: int, console: Console) -> ServingView:
    """Returns a live line if the console is a terminal, else lines."""
    return (LiveServingView if console.is_terminal else ServingView)(requests, console)
