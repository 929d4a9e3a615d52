"""Captures one bucket after the other: within budgets, timed, recorded in a journal."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from graphs.buckets.axes import Bucket
from graphs.capture.capture import CapturedGraph, capture, median_seconds
from graphs.capture.contract import CaptureSpec, Job
from graphs.capture.garbage import collection_paused
from graphs.capture.inputs import Input, NotInputs
from graphs.errors import CaptureError, GraphBudgetExceeded
from graphs.warmup.journal import Journal
from graphs.warmup.report import BucketResult
from graphs.warmup.shape_groups import ShapeGroups
from graphs.warmup.workers import Workers, one_thread, why_no_workers
from graphs.watch.compiles import CompileWatch

__all__ = ["Capturing"]

_log = logging.getLogger(__name__)

_LONG = 0.1  # seconds of a run after which a second timing says little more


@dataclass
class Capturing:
    """Captures a callable at each bucket; see :class:`~graphs.WarmupManager`.

    Raises:
        ValueError: a negative number, or less than one worker.
    """

    spec: CaptureSpec
    module: Callable[..., Any]
    make_inputs: Callable[[Bucket], Sequence[Input]]
    groups: ShapeGroups
    budget_seconds: float | None
    budget_bytes: int | None
    workers: int
    timed_runs: int
    journal: Journal | None = None

    def __post_init__(self) -> None:
        least = {"budget_seconds": 0, "budget_bytes": 0, "workers": 1, "timed_runs": 0}
        for name, limit in least.items():
            value = getattr(self, name)
            if value is not None and value < limit:
                raise ValueError(f"{name} is {value}; expected at least {limit}")

    @property
    def measured(self) -> Mapping[Bucket, float]:
        """Seconds of earlier captures, from the journal."""
        return self.journal.seconds if self.journal else {}

    def graph_name(self, bucket: Bucket) -> str:
        """Return the name of a bucket's graph in errors and logs."""
        return f"{self.spec.name}[{bucket}]"

    def previously_failed_last(self, buckets: Sequence[Bucket]) -> list[Bucket]:
        """Move buckets to the end that failed or killed an earlier process."""
        return sorted(buckets, key=self._previously_failed().__contains__)

    def _previously_failed(self) -> Sequence[Bucket]:
        return self.journal.previously_failed if self.journal else []

    def capture_order(self, todo: Sequence[Bucket]) -> Generator[Bucket]:
        """Yield each bucket once, while workers compile some of them ahead.

        Without workers, or with nothing to share, in the given order. Else buckets in the store
        come first, then each shape group as soon as its representative is compiled, and previously
        failed buckets last.
        """
        seconds = self.budget_seconds
        until = None if seconds is None else time.monotonic() + seconds
        ahead = self._not_stored(todo) if self.workers > 1 else []
        if len(ahead) < 2:
            return (yield from todo)
        key, failed = self.groups.key, self._previously_failed()
        groups: dict[Bucket, list[Bucket]] = {key(bucket): [] for bucket in ahead}
        stored, last = list[Bucket](), list[Bucket]()
        for bucket in todo:
            if bucket not in ahead:
                place = last if bucket in failed else groups.get(key(bucket), stored)
                place.append(bucket)
        yield from stored
        for representative in self._compile_ahead(ahead, until):
            yield representative
            yield from groups[key(representative)]
        yield from last

    def _compile_ahead(self, todo: Sequence[Bucket], until: float | None) -> Generator[Bucket]:
        if reason := self._prepare_workers():
            _log.warning("%s: workers=%d compile nothing: %s", self.spec.name, self.workers, reason)
            return (yield from todo)
        with Workers(
            len(todo), self.workers - 1, lambda job: self._precompile(todo[job]), until=until
        ) as jobs:
            yield from (todo[job] for job in jobs)

    def attempt(
        self, bucket: Bucket, elapsed: float, bytes: int
    ) -> tuple[CapturedGraph | None, BucketResult]:
        """Capture and time a bucket, unless a budget is spent; an error becomes its result.

        Args:
            bucket: to capture.
            elapsed: seconds since the warmup began.
            bytes: of all graphs so far.

        Raises:
            GraphBudgetExceeded: a strict `no_compile` is armed.
            NotInputs: `make_inputs` did not return a tuple or list.
        """
        if reason := self._spent_budget(elapsed, bytes):
            return None, BucketResult(bucket, "skipped", error=reason, name=self.spec.name)
        if self.journal:
            self.journal.start(bucket)
        graph, result = self._attempt(bucket)
        if self.journal:
            self.journal.done(result)
        return graph, result

    def capture(self, bucket: Bucket) -> CapturedGraph:
        """Capture a bucket, whatever the budgets."""
        spec = self._spec_of(bucket)
        return self._capture(spec, self.make_inputs(bucket))

    def _not_stored(self, todo: Sequence[Bucket]) -> list[Bucket]:
        """Representatives whose graph is in no store, for workers to compile."""
        failed, found = self._previously_failed(), []
        for bucket in self.groups.representatives(each for each in todo if each not in failed):
            is_stored = False
            with contextlib.suppress(Exception), torch.no_grad():  # its capture will say why
                is_stored = self.spec.backend.has(self._job(bucket))
            if not is_stored:
                found.append(bucket)
        return found

    def _prepare_workers(self) -> str:
        """Load here what workers need; return the reason if they would be of no use."""
        backend = self.spec.backend
        try:
            replace(self.spec)  # a CaptureError, if the backend has stopped working
            if not (reason := backend.why_no_precompile() or why_no_workers()):
                backend.prepare()
            return reason
        except GraphBudgetExceeded:
            raise
        except CaptureError as error:
            return error.detail
        except Exception as error:
            return _describe(error).split("\n")[0]

    def _precompile(self, bucket: Bucket) -> None:
        with torch.no_grad(), collection_paused:
            with one_thread():
                job = self._job(bucket)
            self.spec.backend.precompile(job)

    def _attempt(self, bucket: Bucket) -> tuple[CapturedGraph | None, BucketResult]:
        with CompileWatch(all_threads=False) as watch:
            start, graph = time.perf_counter(), None
            try:
                spec = self._spec_of(bucket)
                inputs = self.make_inputs(bucket)
                graph = self._capture(spec, inputs)
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

    def _spent_budget(self, elapsed: float, size: int) -> str:
        if self.budget_seconds is not None and elapsed >= self.budget_seconds:
            return f"budget of {self.budget_seconds:g} s is spent"
        if self.budget_bytes is not None and size >= self.budget_bytes:
            return f"budget of {self.budget_bytes} bytes is spent"
        return ""

    def _capture(self, spec: CaptureSpec, inputs: Sequence[Input]) -> CapturedGraph:
        with torch.no_grad():
            return capture(self.module, inputs, backend=spec)

    def _job(self, bucket: Bucket) -> Job:
        spec = self._spec_of(bucket)
        return Job(self.module, self.make_inputs(bucket), spec)

    def _spec_of(self, bucket: Bucket) -> CaptureSpec:
        sizes = self.groups.sizes_of(bucket)
        return replace(self.spec, name=self.graph_name(bucket), sizes=sizes)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
