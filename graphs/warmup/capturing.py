"""Captures one bucket after the other: within budgets, timed, recorded in a journal."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from graphs.buckets.space import Bucket
from graphs.capture.capture import CapturedGraph, capture, median_seconds
from graphs.capture.contract import CaptureSpec
from graphs.capture.inputs import Input, NotInputs
from graphs.errors import CaptureError, GraphBudgetExceeded
from graphs.warmup.journal import Journal
from graphs.warmup.report import BucketResult
from graphs.warmup.schedule import ShapeGroups
from graphs.watch.compiles import CompileWatch

__all__ = ["Budget", "Capturing"]

_log = logging.getLogger(__name__)

_LONG = 0.1  # seconds of a run after which a second timing says little more


@dataclass(frozen=True)
class Budget:
    """What a warmup may take; None: any.

    Raises:
        ValueError: a negative number.
    """

    seconds: float | None = None
    bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("seconds", "bytes"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"budget_{name} is {value}; expected at least 0")

    def spent(self, elapsed: float, size: int) -> str:
        """Say which limit is reached after `elapsed` seconds with `size` bytes; else empty."""
        if self.seconds is not None and elapsed >= self.seconds:
            return f"budget of {self.seconds:g} s is spent"
        if self.bytes is not None and size >= self.bytes:
            return f"budget of {self.bytes} bytes is spent"
        return ""


@dataclass
class Capturing:
    """Captures a callable at each bucket; see :class:`~graphs.WarmupManager`.

    Raises:
        ValueError: a negative number.
    """

    spec: CaptureSpec
    module: Callable[..., Any]
    make_inputs: Callable[[Bucket], Sequence[Input]]
    groups: ShapeGroups
    timed_runs: int
    journal: Journal | None = None

    def __post_init__(self) -> None:
        if self.timed_runs < 0:
            raise ValueError(f"timed_runs is {self.timed_runs}; expected at least 0")

    @property
    def measured(self) -> Mapping[Bucket, float]:
        """Seconds of earlier captures, from the journal."""
        return self.journal.seconds if self.journal else {}

    def graph_name(self, bucket: Bucket) -> str:
        """Return the name of a bucket's graph in errors and logs."""
        return f"{self.spec.name}[{bucket}]"

    def previously_failed_last(self, buckets: Sequence[Bucket]) -> list[Bucket]:
        """Move buckets to the end that failed or killed an earlier process."""
        failed = self.journal.previously_failed if self.journal else []
        return sorted(buckets, key=failed.__contains__)

    def try_capture(self, bucket: Bucket, spent: str) -> tuple[CapturedGraph | None, BucketResult]:
        """Capture and time a bucket, unless a budget is spent; an error becomes its result.

        Args:
            bucket: to capture.
            spent: which budget is spent; empty: none.

        Raises:
            GraphBudgetExceeded: a strict `no_compile` is armed.
            NotInputs: `make_inputs` did not return a tuple or list.
        """
        if spent:
            return None, BucketResult(bucket, "skipped", error=spent, name=self.spec.name)
        if self.journal:
            self.journal.start(bucket)
        graph, result = self._try_capture(bucket)
        if self.journal:
            self.journal.done(result)
        return graph, result

    def capture(self, bucket: Bucket) -> CapturedGraph:
        """Capture a bucket, whatever the budgets."""
        return self._capture(bucket)[0]

    def _try_capture(self, bucket: Bucket) -> tuple[CapturedGraph | None, BucketResult]:
        with CompileWatch(all_threads=False) as watch:
            start, graph = time.perf_counter(), None
            try:
                graph, inputs = self._capture(bucket)
                seconds = time.perf_counter() - start
                run_seconds = self._run_seconds(graph, inputs, watch.compiles > 0)
            except (GraphBudgetExceeded, NotInputs):
                raise
            except Exception as error:
                if graph is not None:
                    graph.close()
                text = error.detail if isinstance(error, CaptureError) else _describe(error)
                seconds = time.perf_counter() - start
                _log.warning("%s: capture failed: %s", self.graph_name(bucket), text)
                return None, BucketResult(
                    bucket, "failed", seconds, 0, watch.compiles, text, name=self.spec.name
                )
        return graph, BucketResult(
            bucket,
            "captured",
            seconds,
            graph.bytes,
            watch.compiles,
            run_seconds=run_seconds,
            name=self.spec.name,
            is_loaded=graph.is_loaded,
            graph=graph.shared_as or graph.name,
            why_alone=graph.why_alone,
        )

    def _run_seconds(
        self, graph: CapturedGraph, inputs: Sequence[Input], compiled: bool
    ) -> float | None:
        if not self.timed_runs:
            return None
        if not compiled and graph.run_seconds and graph.run_seconds > _LONG:
            return graph.run_seconds
        with torch.no_grad():
            return median_seconds(graph, inputs, self.timed_runs)

    def _capture(self, bucket: Bucket) -> tuple[CapturedGraph, Sequence[Input]]:
        sizes = self.groups.sizes_of(bucket)  # before the inputs to run on, see there
        spec = replace(self.spec, name=self.graph_name(bucket), sizes=sizes)
        inputs = self.make_inputs(bucket)
        with torch.no_grad():
            return capture(self.module, inputs, backend=spec), inputs


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
