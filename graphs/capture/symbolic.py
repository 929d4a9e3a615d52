"""Symbolic sizes: graphs shared by captures of one callable that differ only in sizes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from graphs.capture.frozen import Frozen
from graphs.capture.inputs import Input
from graphs.errors import CaptureError

__all__ = ["SymbolicSizes"]

_log = logging.getLogger(__name__)


class SymbolicSizes:
    """Symbolic sizes of one callable, and the graphs that its captures share.

    Args:
        name: of the graphs, for reports.
        dims: for each input, its dimensions of symbolic size.
        runs: how many captures run a graph, see :class:`~graphs.capture.contract.CaptureSpec`.
    """

    def __init__(self, name: str, dims: Sequence[Sequence[int]], runs: int | None = None) -> None:
        self.name = name
        self.dims = tuple(map(tuple, dims))
        self._runs = runs
        self._graphs: list[Frozen] = []
        self._ran: list[int] = []
        self._written: set[str] = set()
        self._unsupported = ""

    def capture(
        self,
        name: str,
        examples: Sequence[Input],
        warm_runs: int,
        make: Callable[[], Frozen],
        alone: Callable[[], Frozen],
    ) -> Frozen:
        """Return a graph that runs on the examples: a shared one, a new one to share, or its own.

        Where enough captures have run a shared graph, this one does not.

        Args:
            name: of the capture.
            examples: inputs to run on.
            warm_runs: how often.
            make: compiles or loads a graph of symbolic sizes, and runs it on the examples.
            alone: captures at the sizes of the examples.

        Raises:
            CaptureError: neither way of capturing works.
        """
        mismatch = ""
        for index, graph in enumerate(self._graphs):
            if mismatch := graph.why_not(examples):
                continue
            if self._runs is not None and self._ran[index] >= self._runs:
                return replace(graph, shared_as=self._graph_name(index))
            self._ran[index] += 1
            start = time.perf_counter()
            try:
                graph = graph.warm_up(examples, name, warm_runs)
                seconds = (time.perf_counter() - start) / warm_runs
                return replace(graph, shared_as=self._graph_name(index), run_seconds=seconds)
            except CaptureError as error:  # such as of inputs that share memory
                why = f"{self._graph_name(index)} fails on its inputs: {error.detail}"
                frozen = alone()
            _log.warning("%s: compiled at fixed sizes: %s", name, why)
            return replace(frozen, why_alone=why)
        if self._unsupported:
            return replace(alone(), why_alone=self._unsupported)
        try:
            graph = make()
        except CaptureError as error:
            frozen = alone()
            self._unsupported = f"{self.name} cannot be compiled: {error.detail}"
            _log.warning("%s: compiled at fixed sizes: %s", name, self._unsupported)
            return replace(frozen, why_alone=self._unsupported)
        self._graphs.append(graph)
        self._ran.append(1)
        if mismatch:
            mismatch = f"it does not fit {self.name}: {mismatch}"
            _log.warning("%s: compiled by itself: %s", name, mismatch)
        name = self._graph_name(len(self._graphs) - 1)
        return replace(graph, shared_as=name, why_alone=mismatch)

    def written_by_all(self, written: Iterable[str]) -> frozenset[str]:
        """Add what a capture has written to; return what all have, as some do not run."""
        self._written.update(written)
        return frozenset(self._written)

    def _graph_name(self, index: int) -> str:
        return f"{self.name} {index + 1}" if index else self.name
