"""Captures of one bucket after the other: within budgets, noted in a journal, timed, shared out."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from graphs.buckets.axes import Bucket
from graphs.capture.capture import CapturedGraph, capture, median_seconds, resolve
from graphs.capture.contract import Backend
from graphs.capture.inputs import Input
from graphs.errors import CaptureError, GraphBudgetExceeded
from graphs.warmup.journal import Journal
from graphs.warmup.report import BucketResult
from graphs.warmup.workers import Workers, one_thread, why_no_workers
from graphs.watch.compiles import CompileWatch

__all__ = ["Capturing"]

_log = logging.getLogger(__name__)


class Capturing:
    """Captures a callable at one bucket after the other.

    Args:
        name, module, make_inputs, backend, options, budget_seconds, budget_bytes, workers, journal,
            timed_runs: see :class:`~graphs.WarmupManager`.
        axes: names of the buckets' axes, for the journal.

    Raises:
        ValueError: a negative number, or less than one worker.
        CaptureError: the backend is unknown, or does not work here.
        graphs.warmup.journal.JournalError: the journal is another file, or another warmup's.
    """

    def __init__(
        self,
        name: str,
        module: Callable[..., Any],
        make_inputs: Callable[[Bucket], Sequence[Input]],
        backend: str | Backend,
        options: Mapping[str, Any],
        *,
        axes: Sequence[str],
        budget_seconds: float | None,
        budget_bytes: int | None,
        workers: int,
        journal: str | Path | None,
        timed_runs: int,
    ) -> None:
        for what, least, value in (
            ("budget_seconds", 0, budget_seconds),
            ("budget_bytes", 0, budget_bytes),
            ("workers", 1, workers),
            ("timed_runs", 0, timed_runs),
        ):
            if value is not None and value < least:
                raise ValueError(f"{what} is {value}; expected at least {least}")
        self.name = name
        self._module = module
        self._make_inputs = make_inputs
        self._backend = resolve(backend, name)
        self._options = options
        self._budget_seconds = budget_seconds
        self._budget_bytes = budget_bytes
        self._workers = workers
        self._timed_runs = timed_runs
        self._journal = (
            None if journal is None else Journal(journal, name, self._backend.name, axes)
        )

    @property
    def measured(self) -> Mapping[Bucket, float]:
        """Seconds of earlier captures, out of the journal."""
        return self._journal.seconds if self._journal else {}

    def graph_name(self, bucket: Bucket) -> str:
        """What the graph of a bucket is called in errors and logs."""
        return f"{self.name}[{bucket}]"

    def suspects_last(self, buckets: Sequence[Bucket]) -> list[Bucket]:
        """The buckets, those last that failed or killed an earlier process."""
        suspects = self._journal.suspects if self._journal else []
        return sorted(buckets, key=suspects.__contains__)

    def shared_out(self, todo: Sequence[Bucket]) -> Generator[Bucket]:
        """Give all of `todo` once, while workers compile some of it beforehand.

        In order, but what a store has comes first, and then what a worker has done meanwhile.
        """
        if self._workers == 1:
            return (yield from todo)
        yield from (ready := self._stored(todo))
        rest = [bucket for bucket in todo if bucket not in ready]
        if len(rest) > 1:
            if not (reason := self._prepare_workers()):
                others = self._workers - 1
                with Workers(len(rest), others, lambda job: self._precompile(rest[job])) as jobs:
                    return (yield from (rest[job] for job in jobs))
            _log.warning("%s: workers=%d compile nothing: %s", self.name, self._workers, reason)
        yield from rest

    def attempt(
        self, bucket: Bucket, elapsed: float, bytes: int
    ) -> tuple[CapturedGraph | None, BucketResult]:
        """Capture a bucket, unless a budget is spent, and time it; an error becomes its result.

        Args:
            bucket: to capture.
            elapsed: seconds since the warmup began.
            bytes: of all graphs so far.

        Raises:
            GraphBudgetExceeded: a strict `no_compile` is armed.
        """
        if reason := self._spent(elapsed, bytes):
            return None, BucketResult(bucket, "skipped", error=reason, name=self.name)
        if self._journal:
            self._journal.start(bucket)
        graph, result = self._attempt(bucket)
        if self._journal:
            self._journal.done(result)
        return graph, result

    def capture(self, bucket: Bucket) -> CapturedGraph:
        """Capture a bucket, whatever the budgets."""
        return self._capture(bucket, self._make_inputs(bucket))

    def _stored(self, todo: Sequence[Bucket]) -> list[Bucket]:
        """The buckets whose graphs the backend finds in a store, and so need not compile."""
        found = []
        for bucket in todo:
            with contextlib.suppress(Exception), torch.no_grad():  # its capture will say why
                if self._backend.has(self._module, self._make_inputs(bucket), **self._options):
                    found.append(bucket)
        return found

    def _prepare_workers(self) -> str:
        """Load here what workers need; the reason, where they would be of no use."""
        try:
            backend = resolve(self._backend, self.name)
            if not (reason := backend.why_no_precompile() or why_no_workers()):
                backend.prepare()
            return reason
        except GraphBudgetExceeded:
            raise
        except CaptureError as error:
            return error.detail
        except Exception as error:
            return _named(error).split("\n")[0]

    def _precompile(self, bucket: Bucket) -> None:
        with torch.no_grad():
            with one_thread():
                inputs = self._make_inputs(bucket)
            name = self.graph_name(bucket)
            self._backend.precompile(self._module, inputs, name=name, **self._options)

    def _attempt(self, bucket: Bucket) -> tuple[CapturedGraph | None, BucketResult]:
        with CompileWatch(all_threads=False) as watch:
            start, graph = time.perf_counter(), None
            try:
                inputs = self._make_inputs(bucket)
                graph = self._capture(bucket, inputs)
                seconds = time.perf_counter() - start
                run_seconds = self._time(graph, inputs)
            except GraphBudgetExceeded:
                raise
            except Exception as error:
                if graph is not None:
                    graph.close()
                text = error.detail if isinstance(error, CaptureError) else _named(error)
                seconds = time.perf_counter() - start
                _log.warning("%s: capture failed: %s", self.graph_name(bucket), text)
                return None, BucketResult(
                    bucket, "failed", seconds, 0, watch.compiles, text, name=self.name
                )
        return graph, BucketResult(
            bucket,
            "captured",
            seconds,
            graph.bytes,
            watch.compiles,
            run_seconds=run_seconds,
            name=self.name,
            is_loaded=graph.is_loaded,
        )

    def _spent(self, elapsed: float, size: int) -> str:
        if self._budget_seconds is not None and elapsed >= self._budget_seconds:
            return f"budget of {self._budget_seconds:g} s is spent"
        if self._budget_bytes is not None and size >= self._budget_bytes:
            return f"budget of {self._budget_bytes} bytes is spent"
        return ""

    def _time(self, graph: CapturedGraph, inputs: Sequence[Input]) -> float | None:
        if not self._timed_runs:
            return None
        with torch.no_grad():
            return median_seconds(graph, inputs, self._timed_runs)

    def _capture(self, bucket: Bucket, inputs: Sequence[Input]) -> CapturedGraph:
        with torch.no_grad():
            return capture(
                self._module,
                inputs,
                backend=self._backend,
                name=self.graph_name(bucket),
                **self._options,
            )


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
