"""The warmup manager: captures every bucket before the first request, then serves."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NoReturn, TypeAlias, get_args

import torch

from graphs.buckets.space import Bucket, BucketSpace
from graphs.capture.capture import CapturedGraph, spec_of
from graphs.capture.contract import Backend, CaptureSpec
from graphs.capture.inputs import Input, parameter_names
from graphs.capture.structure import CallStructure, as_call, by_position, flat_call
from graphs.errors import (
    BucketOverflow,
    CaptureError,
    InputMismatch,
    ModeMismatch,
    StaleGraph,
    quoted,
)
from graphs.warmup.capturing import Budget, Capturing
from graphs.warmup.journal import Journal
from graphs.warmup.report import BucketEvent, BucketResult, WarmupReport
from graphs.warmup.schedule import Order, Schedule, ShapeGroups, Usage, in_order

__all__ = ["WarmupManager"]

_log = logging.getLogger(__name__)

Overflow: TypeAlias = Literal["error", "split", "eager", "compile"]
Progress: TypeAlias = Callable[[BucketEvent], None]


class WarmupManager:
    """One captured graph per bucket: `warmup()` captures, `bucket()` chooses, `run()` runs.

    Capture and serving both happen under `torch.no_grad()`.

    Args:
        module: the callable or `nn.Module` to capture.
        buckets: the shapes to capture it at.
        make_inputs: makes the example inputs of a bucket: by position (a tuple or list) or by
            keyword (a dict), with tensors, constants, and containers of them as for
            :func:`graphs.capture`. The callable really runs on them, so they must do no harm.
        backend: a name out of :func:`~graphs.available_backends`, a backend object, or a
            :class:`~graphs.capture.contract.CaptureSpec`.
        order: `largest_first` (by the space's cost), `smallest_first`, `most_used` (the largest,
            then by `usage`), `given`, or a key function of a bucket.
        usage: how often each need came, for `most_used`: `{Bucket(tokens=37): 120, ...}`.
        budget_seconds, budget_bytes: start no capture once the warmup took this long, or once all
            graphs together take this much memory; the rest is reported as skipped.
        journal: file for the result of each bucket. A later process with the same journal captures
            previously failed buckets last, and estimates the remaining time from the start.
        timed_runs: how many runs of each graph to time after its capture, for `report.cost`; fewer
            if they take longer than a tenth of a second, none if a graph that others share took
            longer than that in its capture. These runs are real.
        overflow: what to do with a need that no captured bucket holds. `error` and `split` raise
            :class:`~graphs.BucketOverflow`; with `split` the caller cuts the step. `eager` runs the
            callable itself, `compile` captures a bucket of exactly that size: these are fallbacks.
        name: for errors and logs; default: the callable's name.
        options: other fields of the spec, and options of the backend. `strict` (default True) makes
            a fallback an error; otherwise it is counted, and logged once with its reason.
            `symbolic` names the axes whose sizes the compiled graphs leave open, so that one
            compile serves all buckets that differ only in them; sizes 0 and 1 are compiled apart.
            Each bucket is still captured with inputs of its own sizes, and runs on no others. A
            bucket that the graph does not fit gets its own, and the report says why. Only backends
            that compile through Dynamo support it. With `shared_runs` only so many buckets run a
            graph that they share.

    Attributes:
        report: on all buckets so far, None before the first warmup.
        overflows: needs that no captured bucket held.
        degraded: needs that went to a larger bucket, since their own is not captured.
        fallbacks: runs that were eager or captured late.

    Raises:
        ValueError: an unknown `order`, `overflow` or symbolic axis, or a negative budget.
        TypeError: an option that the backend does not know.
        CaptureError: the backend is unknown, does not work here, or has no symbolic sizes.
        graphs.warmup.journal.JournalError: the journal is another file, or another warmup's.
    """

    def __init__(
        self,
        module: Callable[..., Any],
        buckets: BucketSpace,
        make_inputs: Callable[[Bucket], Sequence[Any] | Mapping[str, Any]],
        *,
        backend: str | Backend | CaptureSpec = "inductor",
        order: Order = "largest_first",
        usage: Usage | None = None,
        budget_seconds: float | None = None,
        budget_bytes: int | None = None,
        journal: str | Path | None = None,
        timed_runs: int = 3,
        overflow: Overflow = "error",
        name: str = "",
        **options: Any,
    ) -> None:
        if overflow not in get_args(Overflow):
            raise ValueError(f"overflow is {overflow!r}; expected one of {get_args(Overflow)}")
        if not isinstance(buckets, BucketSpace):
            raise TypeError(
                f"buckets: expected a BucketSpace, got {quoted(buckets)}: make one, see "
                "graphs.BucketSpace"
            )
        spec = spec_of(module, backend, name, **options)
        self.buckets = buckets
        self.name = spec.name
        self.overflows = self.degraded = self.fallbacks = 0
        self._module = module
        self._order = in_order(buckets, order, usage)

        self._make_inputs = make_inputs
        self._structure: CallStructure | None = None
        self._is_flat = False
        groups = ShapeGroups(self.name, spec.symbolic, buckets, self._flat_inputs, spec.shared_runs)
        self._budget = Budget(budget_seconds, budget_bytes)
        self._capturing = Capturing(spec, module, self._flat_inputs, groups, timed_runs)
        if journal is not None:  # the file is touched only after everything else is valid
            self._capturing.journal = Journal(journal, self.name, spec.backend.name, buckets.names)
        self._overflow = overflow
        self._strict = spec.strict
        self._graphs: dict[Bucket, CapturedGraph] = {}
        self._results: dict[Bucket, BucketResult] = {}
        self._hits: dict[Bucket, int] = {}
        self._serving: BucketSpace | None = None
        self._elapsed_seconds = 0.0
        self._logged: set[str] = set()

    def _flat_inputs(self, bucket: Bucket) -> Sequence[Input]:
        """Make the example inputs of a bucket; the first ones decide how inputs are nested."""
        source = f"make_inputs({bucket})"
        args, kwargs = as_call(self._make_inputs(bucket), source)
        if self._structure is not None:
            return self._structure.flatten(args, kwargs, source)
        if self._is_flat:
            names = parameter_names(self._module, len(args) + len(kwargs))
            return by_position(names, args, kwargs, source)
        self._module, inputs, self._structure = flat_call(self._module, args, kwargs)
        self._capturing.module, self._is_flat = self._module, self._structure is None
        return inputs

    def warmup(
        self,
        progress: Progress | None = None,
        *,
        budget_seconds: float | None = None,
        budget_bytes: int | None = None,
    ) -> WarmupReport:
        """Capture every bucket that is not captured yet, and report on all of them.

        A bucket that fails is reported, and its needs go to the next larger one. After an
        interruption (Ctrl-C) captured buckets serve; calling `warmup` again continues.

        Args:
            progress: called with a :class:`~graphs.BucketEvent` when a bucket starts, and when it
                is done.
            budget_seconds, budget_bytes: of this warmup, besides those of the manager.

        Raises:
            CaptureError: no bucket is captured, and at least one failed; the report has the cause
                of each.
            GraphBudgetExceeded: a strict `no_compile` is armed.
            TypeError: `make_inputs` did not return a tuple, list or dict of inputs.
        """
        waiting = [bucket for bucket in self._order if bucket not in self._graphs]
        todo = self._capturing.previously_failed_last(waiting)
        group_key = self._capturing.groups.key
        schedule = Schedule(todo, self._capturing.measured, group_key)
        notify: Progress = progress or (lambda event: None)
        at = 0, todo[0] if todo else self.buckets.largest
        budgets = self._budget, Budget(budget_seconds, budget_bytes)
        try:
            with self._capturing.spec.backend.warming_up():
                for at in enumerate(todo):
                    self._do(*at, schedule, notify, budgets)
        except BaseException as error:
            index, bucket = at
            text = type(error).__name__
            notify(schedule.event(bucket, index, "interrupted", error=text, name=self.name))
            raise
        finally:
            self._elapsed_seconds += schedule.elapsed()
            self._serve(self._graphs)
        if not self._graphs and (cause := self._first_failure()):
            raise CaptureError(self.name, cause)
        return self.report or WarmupReport((), 0.0)

    def _first_failure(self) -> str:
        """How many buckets are captured, and why the first failed one is not; empty if none has."""
        failed = self.report.failed if self.report else ()
        if not failed:
            return ""
        first = failed[0]
        return (
            f"{len(self._graphs)} of {len(self.buckets)} captured; first cause, of "
            f"{self._capturing.graph_name(first.bucket)}: {first.error}"
        )

    def _why_none(self) -> str:
        if cause := self._first_failure():
            return f"{cause}; remove the cause, then call warmup() again"
        return "no bucket is captured; call warmup() first"

    def _do(
        self,
        index: int,
        bucket: Bucket,
        schedule: Schedule,
        notify: Progress,
        budgets: Iterable[Budget],
    ) -> None:
        notify(schedule.event(bucket, index, "started", name=self.name))
        elapsed, size = schedule.elapsed(), sum(graph.bytes for graph in self._graphs.values())
        spent = next(filter(None, (each.spent(elapsed, size) for each in budgets)), "")
        graph, result = self._capturing.try_capture(bucket, spent)
        if graph is not None:
            self._graphs[bucket] = graph
        self._results[bucket] = result
        schedule.done(result)
        fields = {name: getattr(result, name) for name in ("seconds", "bytes", "compiles", "error")}
        notify(schedule.event(bucket, index, result.status, **fields, name=self.name))

    @property
    def report(self) -> WarmupReport | None:
        """The result of every bucket that a warmup has reached, or None before the first."""
        if not self._results:
            return None
        results = (self._results[bucket] for bucket in self._order if bucket in self._results)
        return WarmupReport(tuple(results), self._elapsed_seconds)

    @property
    def pending(self) -> int:
        """How many buckets are not captured yet."""
        return sum(bucket not in self._graphs for bucket in self.buckets)

    def bucket(self, **need: int) -> Bucket:
        """Choose the cheapest captured bucket that holds `need`, and count the hit.

        Raises:
            BucketOverflow: no captured bucket holds it, and the policy is not a permitted fallback.
            CaptureError: nothing is captured.
            ValueError: an axis is missing or unknown, or a value is negative.
        """
        chosen = self.find(**need)
        self.count(chosen)
        return chosen

    def find(self, **need: int) -> Bucket:
        """As :meth:`bucket`, but without counting a hit."""
        if self._serving is None:
            raise CaptureError(self.name, self._why_none())
        try:
            chosen = self._serving.pick(**need)
        except BucketOverflow as overflow:
            chosen = self._overflown(need, overflow)
        else:
            if len(self._serving) < len(self.buckets):
                self._note_degraded(need, chosen)
        return chosen

    def count(self, bucket: Bucket) -> None:
        """Count a hit of a bucket."""
        self._hits[bucket] = self._hits.get(bucket, 0) + 1

    def graph(self, bucket: Bucket) -> CapturedGraph:
        """Return the graph of a captured bucket.

        Raises:
            CaptureError: the bucket is not captured.
        """
        return self._graphs.get(bucket) or self._refuse_uncaptured(bucket)

    def run(self, bucket: Bucket, /, *inputs: Any, **keywords: Any) -> Any:
        """Run the graph of a captured bucket on inputs of its shapes.

        Raises:
            InputMismatch, ModeMismatch, StaleGraph: see :meth:`graphs.CapturedGraph.run`; unless
                `strict`, a stale graph falls back to the callable itself.
            CaptureError: the bucket is not captured.
        """
        if self._structure is not None:
            inputs = self._structure.flatten(inputs, keywords, self.name)
        elif keywords:
            names = parameter_names(self._module, len(inputs) + len(keywords))
            inputs = by_position(names, inputs, keywords, self.name)
        graph = self._graphs.get(bucket)
        if graph is None:
            return self._run_uncaptured(bucket, inputs)
        try:
            if torch.is_grad_enabled():
                with torch.no_grad():
                    return graph.run(*inputs)
            return graph.run(*inputs)
        except StaleGraph as error:
            if self._strict:
                raise
            return self._run_eagerly(inputs, str(error))

    def __call__(self, need: Mapping[str, int], /, *inputs: Any, **keywords: Any) -> Any:
        """Choose the bucket of `need` and run it; `inputs` have the shapes of that bucket.

        Raises:
            BucketOverflow, CaptureError: as :meth:`bucket` and :meth:`run`, with the need in the
                message.
        """
        bucket = self.bucket(**need)
        try:
            return self.run(bucket, *inputs, **keywords)
        except (InputMismatch, ModeMismatch, StaleGraph) as error:
            raise type(error)(f"need {Bucket(**need)}", error.detail) from error

    @property
    def hits(self) -> Mapping[Bucket, int]:
        """How often each bucket was chosen, those of fallbacks included."""
        return MappingProxyType(self._hits)

    def never_hit(self) -> list[Bucket]:
        """Captured buckets that were never chosen, in the order of the space."""
        return [b for b in self.buckets if b in self._graphs and not self._hits[b]]

    def close(self) -> None:
        """Free all graphs. A later warmup captures them again."""
        for graph in self._graphs.values():
            graph.close()
        self._graphs.clear()
        self._capturing.groups.clear()
        self._serve(())

    def _serve(self, captured: Iterable[Bucket]) -> None:
        buckets = [*captured]
        cost = self.buckets.cost
        self._serving = BucketSpace(self.buckets.names, buckets, cost) if buckets else None
        for bucket in buckets:
            self._hits.setdefault(bucket, 0)

    def _note_degraded(self, need: Mapping[str, int], chosen: Bucket) -> None:
        own = self.buckets.pick(**need)
        if own in self._graphs or chosen == own:
            return
        self.degraded += 1
        result = self._results.get(own)
        reason = f"{result.status}: {result.error}" if result else "not captured yet"
        self._log_once(f"{self._capturing.graph_name(own)} is {reason}; its needs go to {chosen}")

    def _overflown(self, need: Mapping[str, int], overflow: BucketOverflow) -> Bucket:
        self.overflows += 1
        if self._overflow in ("error", "split"):
            raise overflow
        if self._strict:
            remedy = (
                f"strict=True forbids overflow={self._overflow!r}; cut the step or capture more"
            )
            raise BucketOverflow(overflow.need, overflow.largest, remedy)
        exact = Bucket(**{name: need[name] for name in self.buckets.names})
        if self._overflow == "compile":
            self.fallbacks += 1
            self._log_once("a need above the captured buckets is captured late", f": {exact}")
            self._graphs[exact] = self._capturing.capture(exact)
            self._serve(self._graphs)
        return exact

    def _run_uncaptured(self, bucket: Bucket, inputs: tuple[Input, ...]) -> Any:
        if self._overflow == "eager" and not self._strict and bucket not in self.buckets:
            return self._run_eagerly(inputs, "a need above the captured buckets", f": {bucket}")
        self._refuse_uncaptured(bucket)

    def _refuse_uncaptured(self, bucket: Bucket) -> NoReturn:
        if self._serving is None:
            raise CaptureError(self.name, self._why_none())
        result = self._results.get(bucket)
        reason = f"{result.status}: {result.error}" if result else "not captured"
        raise CaptureError(
            self._capturing.graph_name(bucket),
            f"{reason}; choose a bucket with bucket(), after warmup()",
        )

    def _run_eagerly(self, inputs: tuple[Input, ...], reason: str, detail: str = "") -> Any:
        self.fallbacks += 1
        self._log_once(f"runs eagerly: {reason}", detail)
        with torch.no_grad():
            return self._module(*inputs)

    def _log_once(self, reason: str, detail: str = "") -> None:
        if reason not in self._logged:
            self._logged.add(reason)
            _log.warning("%s: %s%s; further ones are counted only", self.name, reason, detail)
