"""A callable that runs in buckets."""

from __future__ import annotations

import inspect
import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from graphs.bucketed.comparison import compare_with_eager
from graphs.bucketed.example import by_keyword, copied_call, default_example
from graphs.bucketed.trial import BucketedOptions
from graphs.bucketed.variant import Bound, Variant
from graphs.buckets.recorded import RecordedSizes
from graphs.buckets.space import Bucket
from graphs.capture.inputs import parameters_of
from graphs.capture.structure import as_call
from graphs.errors import BucketOverflow, CaptureError, InputMismatch, quoted
from graphs.warmup.group import WarmupGroup
from graphs.warmup.manager import Progress, WarmupManager
from graphs.warmup.report import WarmupReport

__all__ = ["Bucketed", "Overflow"]

_log = logging.getLogger(__name__)

Overflow: TypeAlias = Literal["error", "eager", "split", "compile"]


class Bucketed(nn.Module):
    """A callable that runs in buckets; made by :func:`graphs.bucketed`.

    A module keeps its attributes (`config`, `dtype`, ...), so that it can take the place of the one
    that it wraps. Calls may come from several threads, and run one at a time.

    Attributes:
        fallbacks: calls that ran eagerly, were split, or captured late.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        example: Sequence[Any] | Mapping[str, Any] | None,
        options: BucketedOptions,
        discrete: Mapping[str, tuple[Any, ...]],
        manager_options: Mapping[str, Any],
        overflow: Overflow,
        split: str,
        max_graphs: int,
        recorded: RecordedSizes | None,
    ) -> None:
        super().__init__()
        self.function = function
        self.training = getattr(function, "training", False)
        self.fallbacks = 0
        self._example = None if example is None else as_call(example, "example")
        self._options = options
        self._discrete = discrete
        self._manager_options = manager_options
        self._overflow, self._split, self._max_graphs = overflow, split, max_graphs
        self._recorded = recorded
        self._defaults = _defaults(function, discrete)
        self._positions = [
            each.name
            for each in parameters_of(function).values()
            if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        ]
        self._members: dict[Any, tuple[Variant, WarmupManager]] = {}
        self._only: tuple[Variant, WarmupManager] | None = None
        self._logged: set[str] = set()
        self._make_locks()

    def _make_locks(self) -> None:
        self._preparing, self._running = threading.RLock(), threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy: it has no graphs, needs a warmup of its own, and records no sizes."""
        new: dict[str, Any] = {"_members": {}, "_only": None, "_recorded": None}
        return {**self.__dict__, **new, "_preparing": None, "_running": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._make_locks()

    def warmup(self, progress: Progress | None = None, **budgets: Any) -> WarmupReport:
        """Check axes, outputs and padding by a few eager runs, then capture every bucket.

        Args:
            progress, budgets: see :meth:`graphs.WarmupManager.warmup`.

        Raises:
            BucketedError: an axis is wrong or ambiguous, results depend on padding, or there is no
                example. Nothing is captured.
            CaptureError: no bucket is captured, or a graph does not compute what the callable does.
            GraphBudgetExceeded: a strict `no_compile` is armed.
        """
        with self._preparing, torch.inference_mode(False):
            self._prepare()
            try:
                report = WarmupGroup(*self.managers, **budgets).warmup(progress)
            finally:
                for variant, _ in self._members.values():
                    variant.plans.clear()
            try:
                for variant, manager in self._members.values():
                    compare_with_eager(variant, manager, self._options.check)
            except Exception:
                self._free()  # a graph that is wrong must not serve
                raise
            return report

    @property
    def pending(self) -> int:
        """How many buckets are not captured yet."""
        if not self._members:
            with self._preparing, torch.inference_mode(False):
                self._prepare()
        return sum(manager.pending for _, manager in self._members.values())

    @property
    def report(self) -> WarmupReport | None:
        """Results of all buckets that a warmup has reached; None before the first."""
        reports = [m.report for _, m in self._members.values() if m.report is not None]
        if not reports:
            return None
        results = tuple(result for report in reports for result in report.results)
        return WarmupReport(results, sum(report.elapsed_seconds for report in reports))

    @property
    def managers(self) -> tuple[WarmupManager, ...]:
        """One for each combination of discrete inputs; empty before the warmup."""
        return tuple(manager for _, manager in self._members.values())

    @property
    def hits(self) -> Mapping[Bucket, int]:
        """How often each bucket served a call."""
        found: dict[Bucket, int] = {}
        for manager in self.managers:
            for bucket, count in manager.hits.items():
                found[bucket] = found.get(bucket, 0) + count
        return found

    @property
    def overflows(self) -> int:
        """How many sizes were larger than every bucket."""
        return sum(manager.overflows for manager in self.managers)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run in a bucket; takes and returns what the callable does.

        Raises:
            InputMismatch: an input is missing, has another dtype, device or fixed size than the
                example, or two inputs disagree about an axis.
            BucketOverflow: no bucket holds these sizes.
            CaptureError: not warmed up.
            BucketedError: an output does not follow the axes as at the warmup.
        """
        if self._forward_hooks or self._forward_pre_hooks:
            return super().__call__(*args, **kwargs)
        return self._serve(args, kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run in a bucket, without the hooks of this module."""
        return self._serve(args, kwargs)

    def _serve(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        member = self._only
        if member is None:
            if not self._members and self._example is None:
                return self._first_call(args, kwargs)
            if args and self._discrete:
                args, kwargs = by_keyword(self._positions, self._discrete, args, kwargs)  # type: ignore[assignment]
            member = self._member(kwargs)
        variant = member[0]
        leaves = variant.flatten(args, kwargs)
        if torch.is_grad_enabled():
            self._refuse_gradients(variant, leaves)
            with torch.no_grad():
                return variant.build(self._run(*member, leaves))
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                return variant.build(self._run(*member, leaves))
        return variant.build(self._run(*member, leaves))

    def close(self) -> None:
        """Free all graphs and buffers, and write recorded sizes. A later warmup captures again."""
        if self._recorded is not None:
            self._recorded.close()
        with self._preparing:
            self._free()

    def _free(self) -> None:
        for variant, manager in self._members.values():
            manager.close()
            variant.plans.clear()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            modules = self.__dict__.get("_modules", {})
            function = self.__dict__.get("function") or modules.get("function")
            if function is None or name.startswith("__"):  # such as __deepcopy__, of this object
                raise
            return getattr(function, name)

    def extra_repr(self) -> str:
        """Buckets, for `print`."""
        return repr(self._options.buckets)

    def _prepare(self) -> None:
        if self._members:
            return
        args, kwargs = self._example or default_example(self.function, self._options.name)
        if self._discrete:
            args, kwargs = by_keyword(self._positions, self._discrete, args, kwargs)
        members: dict[Any, tuple[Variant, WarmupManager]] = {}
        values = [[(name, each) for each in given] for name, given in self._discrete.items()]
        fixed = {name: each for name, each in kwargs.items() if name not in self._discrete}
        for settings in itertools.product(*values):
            call = Bound(self.function, dict(settings)) if settings else self.function
            variant = Variant(self.function, call, args, fixed, self._options, self._running)
            if self._overflow == "split":
                variant.check_split(self._split)
            manager = self._manager(variant, settings, len(members))
            members[_key(value for _, value in settings)] = variant, manager
        self._members = members
        self._only = next(iter(members.values())) if not self._discrete else None

    def _manager(
        self, variant: Variant, settings: Sequence[tuple[str, Any]], number: int
    ) -> WarmupManager:
        shown = ", ".join(f"{name}={value}" for name, value in settings)
        options = dict(self._manager_options)
        if shown and options["journal"] is not None:
            path = Path(options["journal"])
            options["journal"] = path.with_name(f"{path.stem}.{number}{path.suffix}")
        name = f"{self._options.name}({shown})" if shown else self._options.name
        return WarmupManager(
            variant.module, self._options.buckets, variant.inputs_at, name=name, **options
        )

    def _first_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._log_once("runs eagerly and becomes the example, since it comes before warmup()")
        given = by_keyword(self._positions, self._discrete, args, kwargs)
        example = copied_call(self.function, *given, self._discrete)
        with torch.no_grad():
            result = self.function(*args, **kwargs)
        self.fallbacks += 1
        self._example = example
        return result

    def _member(self, kwargs: dict[str, Any]) -> tuple[Variant, WarmupManager]:
        values = []
        for name in self._discrete:
            if name not in kwargs and name not in self._defaults:
                raise InputMismatch(self._options.name, f"'{name}' is missing")
            values.append(kwargs.pop(name, self._defaults.get(name)))
        try:
            member = self._members.get(_key(values))
        except TypeError:  # not hashable
            member = None
        if member is not None:
            return member
        if not self._members:
            raise CaptureError(self._options.name, "is not warmed up; call warmup() first")
        for (name, known), value in zip(self._discrete.items(), values, strict=True):
            if not any(type(value) is type(each) and value == each for each in known):
                shown = ", ".join(map(repr, known))
                raise InputMismatch(
                    self._options.name, f"'{name}' is {quoted(value)}; expected one of {shown}"
                )
        raise AssertionError("each combination has a member")

    def _run(self, variant: Variant, manager: WarmupManager, leaves: Sequence[Any]) -> Any:
        plan, leaves = variant.plans.find(leaves)
        if plan is None:
            sizes = variant.sizes(leaves)
            generation = variant.plans.generation
            try:
                bucket = self._bucket(manager, sizes)
            except BucketOverflow as overflow:
                return self._overflown(variant, manager, leaves, sizes, overflow)
            graph = manager.graph(bucket)
            plan = variant.plans.add(leaves, sizes, bucket, graph, generation)
        if self._recorded is not None:
            self._recorded.add(plan.sizes)
        manager.count(plan.bucket)
        return plan.run(leaves)

    def _bucket(self, manager: WarmupManager, sizes: Mapping[str, int]) -> Bucket:
        before, captured = manager.fallbacks, manager.hits
        if (
            self._overflow == "compile"
            and len(captured) >= self._max_graphs
            and not any(all(each[axis] >= sizes[axis] for axis in sizes) for each in captured)
        ):
            raise BucketOverflow(
                sizes,
                manager.buckets.largest,
                f"max_graphs={self._max_graphs} are captured: raise it, or widen the ranges",
            )
        bucket = manager.find(**sizes)
        self.fallbacks += manager.fallbacks - before
        if wrong := [axis for axis in self._options.exact if bucket[axis] != sizes[axis]]:
            known = sorted({each[wrong[0]] for each in manager.buckets})
            raise BucketOverflow(
                sizes, manager.buckets.largest, f"'{wrong[0]}' is exact, with the sizes {known}"
            )
        return bucket

    def _overflown(
        self,
        variant: Variant,
        manager: WarmupManager,
        leaves: Sequence[Any],
        sizes: Mapping[str, int],
        overflow: BucketOverflow,
    ) -> Any:
        shown = f": {Bucket(**sizes)}"
        if self._overflow == "eager":
            self.fallbacks += 1
            self._log_once("runs eagerly, since no bucket holds it", shown)
            return variant.run_eagerly(leaves)
        most = self._most_of_part(manager, sizes)
        if self._overflow != "split" or not 0 < most < sizes[self._split]:
            remedy = overflow.remedy or "pass smaller inputs, widen the ranges, or overflow='eager'"
            if self._overflow == "split":
                remedy = f"overflow='split' cuts along '{self._split}' only: {remedy}"
            raise BucketOverflow(sizes, overflow.largest, remedy) from None
        self.fallbacks += 1
        self._log_once(f"is split along '{self._split}', since no bucket holds it", shown)
        parts = [
            self._run(variant, manager, part)
            for part in variant.split(leaves, self._split, sizes[self._split], most)
        ]
        return variant.join(parts, self._split)

    def _most_of_part(self, manager: WarmupManager, sizes: Mapping[str, int]) -> int:
        """The largest part along the axis to split that a captured bucket holds; 0: none."""
        exact = self._options.exact
        return max(
            (
                bucket[self._split]
                for bucket in manager.hits
                if all(
                    bucket[axis] == size if axis in exact else bucket[axis] >= size
                    for axis, size in sizes.items()
                    if axis != self._split
                )
            ),
            default=0,
        )

    def _refuse_gradients(self, variant: Variant, leaves: Sequence[Any]) -> None:
        for name, value in zip(variant.axes.inputs, leaves, strict=True):
            if isinstance(value, Tensor) and value.requires_grad:
                raise InputMismatch(
                    self._options.name,
                    f"'{name}' requires a gradient, and captured graphs have none: detach it, or "
                    "call it under torch.no_grad()",
                )

    def _log_once(self, reason: str, detail: str = "") -> None:
        if reason not in self._logged:
            self._logged.add(reason)
            text = "%s: a call %s%s; further ones are counted only"
            _log.warning(text, self._options.name, reason, detail)


def _defaults(function: Callable[..., Any], discrete: Iterable[str]) -> dict[str, Any]:
    found = parameters_of(function)
    return {
        name: found[name].default
        for name in discrete
        if name in found and found[name].default is not inspect.Parameter.empty
    }


def _key(values: Iterable[Any]) -> tuple[Any, ...]:
    return tuple((type(each), each) for each in values)  # True is not 1
