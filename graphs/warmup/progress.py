"""Progress displays of a warmup: a live bar on a terminal, a line per bucket elsewhere."""

from __future__ import annotations

from typing import IO, Any, Self

from graphs.warmup.report import BucketEvent

__all__ = ["progress_for"]


def progress_for(stream: IO[str], title: str = "warmup") -> PlainProgress:
    """Choose a display: live if `stream` is a terminal and rich is installed, else plain lines.

    Example: `manager.warmup(progress_for(sys.stderr))`.
    """
    if stream.isatty():
        try:
            return LiveProgress(stream, title)
        except ImportError:
            pass
    return PlainProgress(stream, title)


class PlainProgress:
    """Prints a line per bucket: `warmup 3/12 tokens=64: 1.52 s, 3.1 MiB, about 14 s left`.

    Called with events; cleans up at the last one or at the end of a `with` statement.
    """

    def __init__(self, stream: IO[str], title: str = "warmup") -> None:
        self._stream = stream
        self._title = title

    def __call__(self, event: BucketEvent) -> None:
        if event.status != "started":
            head = f"{self._title} {event.index + 1}/{event.total} {event.bucket}"
            print(f"{head}: {_result_text(event)}{_rest(event)}", file=self._stream, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass


class LiveProgress(PlainProgress):
    """A live bar with the current bucket, elapsed seconds, seconds per bucket and the time left.

    Raises:
        ImportError: rich is not installed.
    """

    def __init__(self, stream: IO[str], title: str = "warmup") -> None:
        super().__init__(stream, title)
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            ProgressColumn,
            TextColumn,
        )
        from rich.text import Text

        class SecondsColumn(ProgressColumn):
            def render(self, task: Any) -> Text:
                return Text(f"{task.elapsed or 0:.0f} s")

        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            SecondsColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            console=Console(file=stream),
        )
        self._task: Any = None
        self._last = ""

    def __call__(self, event: BucketEvent) -> None:
        if self._task is None:
            self._task = self._bar.add_task(self._title, total=event.total, note="")
            self._bar.start()
        if event.status == "started":
            self._show(event.index, f"{event.bucket}{self._last}{_rest(event)}")
        else:
            self._last = f" (last {event.seconds:.1f} s)"
            if event.status in ("failed", "skipped"):
                line = f"{event.bucket}: {_result_text(event)}"
                self._bar.console.print(line, markup=False, highlight=False)
            done = event.index + (event.status != "interrupted")
            self._show(done, f"{self._last}{_rest(event)}".lstrip())
        if event.is_last:
            self._bar.stop()

    def _show(self, completed: int, note: str) -> None:
        self._bar.update(self._task, completed=completed, note=note, refresh=True)

    def __exit__(self, *exc_info: object) -> None:
        self._bar.stop()


def _result_text(event: BucketEvent) -> str:
    if event.status == "captured":
        return f"{event.seconds:.2f} s, {event.bytes / 2**20:.1f} MiB"
    return f"{event.status}: {event.error}"


def _rest(event: BucketEvent) -> str:
    if event.eta_seconds is None or event.is_last:
        return ""
    return f", about {event.eta_seconds:.0f} s left"
