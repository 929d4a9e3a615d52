"""Runs the cases of the kit on an op."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from compiled_attn.testing.capabilities import Capabilities, CapabilityError
from compiled_attn.testing.kit.cases import CASES, Case, Plan
from compiled_attn.testing.kit.interface import Interface
from compiled_attn.testing.kit.report import Report
from compiled_attn.testing.kit.result import Result
from compiled_attn.testing.kit.shrink import shrink
from compiled_attn.testing.kit.step import JUNK, Step
from compiled_attn.testing.kit.subject import Subject
from compiled_attn.testing.kit.trial import Measured, Mismatch
from graphs.errors import quoted

__all__ = ["check", "run_case", "run_cases", "select", "steps_of"]


def check(
    op: Callable[..., Any],
    capabilities: Capabilities | Mapping[str, Any] | None = None,
    interface: str | type[Interface] | None = None,
    seed: int = 0,
    cases: Collection[str] | None = None,
) -> Report:
    """Tests every feature that a paged attention op claims.

    An op that raises, or returns the wrong shape, fails that case only.

    Args:
        op: a callable with one of the known signatures.
        capabilities: its claims, as `Capabilities` or a dict of its arguments; None: attribute
            ``capabilities`` of the op, or ``CAPABILITIES`` of its module.
        interface: a name in `INTERFACES`, or an `Interface` class; None: by parameter names.
        seed: seed of all inputs.
        cases: substrings of the names of cases to run; None: all.

    Returns:
        a report; ``report.ok`` says whether all cases passed, ``print(report)`` shows the table,
        ``report.script`` is a script of the smallest failing case.

    Raises:
        CapabilityError: (a ValueError) bad input, before anything ran; see `Subject.of`.
    """
    return run_cases(Subject.of(op, capabilities, interface), seed, select(cases))


def select(parts: Collection[str] | None) -> list[Case]:
    """Returns the cases whose names contain one of the parts.

    Raises:
        CapabilityError: a part is in no name.
    """
    for part in parts or ():
        if not any(part in each.name for each in CASES):
            known = ", ".join(each.name for each in CASES)
            raise CapabilityError(f"no case has {quoted(part)} in its name: choose from {known}")
    return [each for each in CASES if not parts or any(part in each.name for part in parts)]


def run_cases(subject: Subject, seed: int = 0, cases: Collection[Case] = tuple(CASES)) -> Report:
    """Runs cases, and shrinks the first that fails.

    If the op lets NaN through, only the cases about NaN fail for it: later ones have finite numbers
    in memory that belongs to no request.
    """
    results: list[Result] = []
    for case in cases:
        failed = [each.case.name for each in results if each.status == "failed"]
        is_finite = "poison_nan" in failed and not case.name.startswith("poison")
        result = run_case(subject, case, seed, may_shrink=not failed, is_finite=is_finite)
        results.append(result)
    return Report(subject, seed, tuple(results))


def run_case(
    subject: Subject,
    case: Case,
    seed: int = 0,
    *,
    may_shrink: bool = True,
    is_finite: bool = False,
) -> Result:
    """Runs one case for the claimed sizes, up to the first failure.

    ``is_finite``: memory that belongs to no request holds no NaN or inf.
    """
    missing = sorted(case.needs - subject.claims.features)
    if missing:
        return Result(case, "not claimed", f"not claimed: {', '.join(missing)}")
    measured, count, start = Measured(), 0, time.perf_counter()
    for step in steps_of(subject, case, seed):
        count += 1
        if is_finite and step.is_poisoned:
            step = step.replace(unowned=JUNK)
        try:
            measured = measured.or_worse(case.check(subject.trial, step))
        except Mismatch as error:
            found, message = step, str(error)
            if may_shrink:
                found, message = shrink(subject, case, step, message)
            return Result(
                case, "failed", message, measured, count, time.perf_counter() - start, found
            )
    seconds = time.perf_counter() - start
    if not count:
        why = f"nothing to test for interface {subject.interface.name}"
        return Result(case, "not claimed", why)
    return Result(case, "passed", measured.note, measured, count, seconds)


def steps_of(subject: Subject, case: Case, seed: int = 0) -> Iterator[Step]:
    """Yields the steps of a case that the interface can express."""
    claims, interface = subject.claims, subject.interface
    # The largest group goes with the first dtype, mostly the most exact one.
    axes = claims.dtypes, claims.head_dims, claims.block_sizes, sorted(claims.groups)[::-1]
    sizes: Iterable[tuple[Any, ...]]
    if case.sizes == "every":
        sizes = itertools.product(*axes)
    else:
        most = max(map(len, axes)) if case.sizes == "each" else 1
        sizes = zip(*(itertools.islice(itertools.cycle(axis), most) for axis in axes), strict=True)
    numbers = itertools.count(1000 * seed)
    for dtype, head_dim, block_size, group in sizes:
        base = Step(
            (), dtype=dtype, head_dim=head_dim, block_size=block_size, heads=2 * group,
            append=interface.appends == "always",
        )  # fmt: skip
        for step in case.steps(Plan(claims, interface, base)):
            step = step.replace(seed=next(numbers))
            if not interface.why_not(step):
                yield step
