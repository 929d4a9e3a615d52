"""Captures of one bucket after the other: within budgets, noted in a journal, timed, shared out."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphs.buckets.axes import Bucket
from graphs.capture.capture import CapturedGraph, capture, median_seconds, resolve
from graphs.capture.contract import Backend
from graphs.capture.garbage import collected_later
from graphs.capture.inputs import Input, NotInputs
from graphs.errors import CaptureError, GraphBudgetExceeded
from graphs.warmup.families import Families
from graphs.warmup.journal import Journal
from graphs.warmup.report import BucketResult
from graphs.warmup.workers import Workers, one_thread, why_no_workers
from graphs.watch.compiles import CompileWatch

__all__ = ["Capturing"]

_log = logging.getLogger(__name__)

_LONG = 0.1  # seconds of a run, of which another one says little more


@dataclass
class Capturing:
    """Captures a callable at one bucket after the other; see :class:`~graphs.WarmupManager`.

    Raises:
        ValueError: a negative number, or less than one worker.
    """

    name: str
    module: Callable[..., Any]
    make_inputs: Callable[[Bucket], Sequence[Input]]
    backend: Backend
    options: Mapping[str, Any]
    budget_seconds: float | None
    budget_bytes: int | None
    workers: int
    timed_runs: int
    families: Families
    journal: Journal | None = None

    def __post_init__(self) -> None:
        least = {"budget_seconds": 0, "budget_bytes": 0, "workers": 1, "timed_runs": 0}
        for name, limit in least.items():
            value = getattr(self, name)
            if value is not None and value < limit:
                raise ValueError(f"{name} is {value}; expected at least {limit}")

    @property
    def measured(self) -> Mapping[Bucket, float]:
        """Seconds of earlier captures, out of the journal."""
        return self.journal.seconds if self.journal else {}

    def graph_name(self, bucket: Bucket) -> str:
        """What the graph of a bucket is called in errors and logs."""
        return f"{self.name}[{bucket}]"

    def suspects_last(self, buckets: Sequence[Bucket]) -> list[Bucket]:
        """The buckets, those last that failed or killed an earlier process."""
        return sorted(buckets, key=self._suspects().__contains__)

    def _suspects(self) -> Sequence[Bucket]:
        return self.journal.suspects if self.journal else []

    def shared_out(self, todo: Sequence[Bucket]) -> Generator[Bucket]:
        """Give all of `todo` once, while workers compile some of it beforehand.

        In order; but where there is something to share out, what a store has comes first, then each
        family behind the first of it, as soon as that is compiled, and suspects last.
        """
        seconds, count = self.budget_seconds, self.workers
        until = None if seconds is None else time.monotonic() + seconds
        compiled = self._lacking(todo) if count > 1 else []
        if len(compiled) < 2:
            return (yield from todo)
        kind, suspects = self.families.kind, self._suspects()
        families: dict[Bucket, list[Bucket]] = {kind(first): [] for first in compiled}
        stored, last = list[Bucket](), list[Bucket]()
        for bucket in todo:
            if bucket not in compiled:
                kept = last if bucket in suspects else families.get(kind(bucket), stored)
                kept.append(bucket)
        yield from stored
        for first in self._by_workers(compiled, count - 1, until):
            yield first
            yield from families[kind(first)]
        yield from last

    def _by_workers(
        self, todo: Sequence[Bucket], others: int, until: float | None
    ) -> Generator[Bucket]:
        """Give all of `todo` once; workers are waited for until a time at most."""

        def work(job: int) -> None:
            self._precompile(todo[job])

        if not (reason := self._prepare_workers()):
            with Workers(len(todo), others, work, until=until) as jobs:
                return (yield from (todo[job] for job in jobs))
        _log.warning("%s: workers=%d compile nothing: %s", self.name, others + 1, reason)
        yield from todo

    def attempt(
        self, bucket: Bucket, elapsed: float, bytes: int
    ) -> tuple[CapturedGraph | None, BucketResult]:
        """Capture a bucket, unless a budget is spent, and time it; an error becomes its result.

        `elapsed` are the seconds since the warmup began, `bytes` those of all graphs so far.

        Raises:
            GraphBudgetExceeded: a strict `no_compile` is armed.
            NotInputs: `make_inputs` returned something that is no tuple or list.
        """
        if reason := self._spent(elapsed, bytes):
            return None, BucketResult(bucket, "skipped", error=reason, name=self.name)
        if self.journal:
            self.journal.start(bucket)
        graph, result = self._attempt(bucket)
        if self.journal:
            self.journal.done(result)
        return graph, result

    def capture(self, bucket: Bucket) -> CapturedGraph:
        """Capture a bucket, whatever the budgets."""
        options = self._options(bucket)
        return self._capture(bucket, self.make_inputs(bucket), options)

    def _lacking(self, todo: Sequence[Bucket]) -> list[Bucket]:
        """The first bucket of each family whose graph is in no store, for workers to compile."""
        suspects, lacking = self._suspects(), []
        for bucket in self.families.firsts(each for each in todo if each not in suspects):
            is_stored = False
            with contextlib.suppress(Exception), torch.no_grad():  # its capture will say why
                options = self._options(bucket)
                is_stored = self.backend.has(self.module, self.make_inputs(bucket), **options)
            if not is_stored:
                lacking.append(bucket)
        return lacking

    def _prepare_workers(self) -> str:
        """Load here what workers need; the reason, where they would be of no use."""
        try:
            resolve(self.backend, self.name)  # a CaptureError, if it has stopped working
            if not (reason := self.backend.why_no_precompile() or why_no_workers()):
                self.backend.prepare()
            return reason
        except GraphBudgetExceeded:
            raise
        except CaptureError as error:
            return error.detail
        except Exception as error:
            return _named(error).split("\n")[0]

    def _precompile(self, bucket: Bucket) -> None:
        with torch.no_grad(), collected_later:
            with one_thread():
                options = self._options(bucket)
                inputs = self.make_inputs(bucket)
            name = self.graph_name(bucket)
            self.backend.precompile(self.module, inputs, name=name, **options)

    def _attempt(self, bucket: Bucket) -> tuple[CapturedGraph | None, BucketResult]:
        with CompileWatch(all_threads=False) as watch:
            start, graph = time.perf_counter(), None
            try:
                options = self._options(bucket)
                inputs = self.make_inputs(bucket)
                graph = self._capture(bucket, inputs, options)
                seconds = time.perf_counter() - start
                run_seconds = self._run_seconds(graph, inputs, watch.compiles > 0)
            except (GraphBudgetExceeded, NotInputs):
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

    def _spent(self, elapsed: float, size: int) -> str:
        if self.budget_seconds is not None and elapsed >= self.budget_seconds:
            return f"budget of {self.budget_seconds:g} s is spent"
        if self.budget_bytes is not None and size >= self.budget_bytes:
            return f"budget of {self.budget_bytes} bytes is spent"
        return ""

    def _capture(
        self, bucket: Bucket, inputs: Sequence[Input], options: Mapping[str, Any]
    ) -> CapturedGraph:
        with torch.no_grad():
            return capture(
                self.module,
                inputs,
                backend=self.backend,
                name=self.graph_name(bucket),
                **options,
            )

    def _options(self, bucket: Bucket) -> Mapping[str, Any]:
        symbolic = self.families.of(bucket)
        return {**self.options, "symbolic": symbolic} if symbolic else self.options


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
