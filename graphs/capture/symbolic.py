"""Symbolic sizes: what captures of one callable share that differ in sizes of inputs alone."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from graphs.capture.contract import Frozen, Job
from graphs.errors import CaptureError

__all__ = ["SymbolicSizes"]

_log = logging.getLogger(__name__)


class SymbolicSizes:
    """The sizes that differ between captures of one callable, and the graphs that they share.

    Args:
        name: of the graphs, for reports.
        dims: for each input, its dimensions of such a size.
    """

    def __init__(self, name: str, dims: Sequence[Sequence[int]]) -> None:
        self.name = name
        self.dims = tuple(map(tuple, dims))
        self._graphs: list[Frozen] = []
        self._refused = ""

    def capture(self, job: Job, make: Callable[[], Frozen], alone: Callable[[], Frozen]) -> Frozen:
        """A graph that runs on the examples: one that is there, or one more, or one of fixed sizes.

        Args:
            job: with the examples.
            make: compiles or loads a graph, and runs it on the examples.
            alone: captures at the sizes of the examples, where no symbol can stand for them.

        Raises:
            CaptureError: neither way of capturing works.
        """
        name, examples, told = job.name, job.examples, ""
        for place, graph in enumerate(self._graphs):
            if told := graph.why_not(examples):
                continue
            start = time.perf_counter()
            try:
                graph = graph.warmed(examples, name, job.warm_runs)
                seconds = (time.perf_counter() - start) / job.warm_runs
                return replace(self._named(graph, place), run_seconds=seconds)
            except CaptureError as error:  # such as of inputs that share memory
                why = f"{self._at(place)} fails on its inputs: {error.detail}"
                frozen = alone()
            _log.warning("%s: compiled at fixed sizes: %s", name, why)
            return replace(frozen, why_alone=why)
        if self._refused:
            return replace(alone(), why_alone=self._refused)
        try:
            graph = make()
        except CaptureError as error:
            frozen = alone()
            self._refused = f"{self.name} cannot be compiled: {error.detail}"
            _log.warning("%s: compiled at fixed sizes: %s", name, self._refused)
            return replace(frozen, why_alone=self._refused)
        self._graphs.append(graph)
        if told:
            told = f"it does not fit {self.name}: {told}"
            _log.warning("%s: compiled by itself: %s", name, told)
        return replace(self._named(graph, len(self._graphs) - 1), why_alone=told)

    def _named(self, frozen: Frozen, place: int) -> Frozen:
        return replace(frozen, shared_as=self._at(place))

    def _at(self, place: int) -> str:
        return f"{self.name} {place + 1}" if place else self.name
