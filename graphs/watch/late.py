"""Takes the file of late work into the next warmup."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from types import CodeType
from typing import Any

from graphs.buckets.space import Axis, BucketSpace
from graphs.errors import GraphBudgetExceeded, LateFileError, clipped
from graphs.torch_internals.compiled_callables import code_of_compiled
from graphs.watch.causes import CompileEvent, reason_of
from graphs.watch.compiles import CompileWatch
from graphs.watch.late_file import LateWork, read_late
from graphs.watch.repeats import CannotRepeat, inputs_of_call, under_modes_of

__all__ = ["LateReport", "late_buckets", "repeat", "warm_up_late"]

_NO_TARGET = (
    "pass what torch.compile returned for it, or for the function that reaches it, to "
    "warm_up_late; or call it in the warmup"
)


@dataclass(frozen=True)
class LateReport:
    """What a warmup took from a file of late work.

    Attributes:
        warmed: calls that were repeated, or compiled as part of one.
        left: the rest, each with what to do about it.
        compiles: how many compiles that were.
    """

    warmed: tuple[LateWork, ...]
    left: tuple[tuple[LateWork, str], ...]
    compiles: int

    def __str__(self) -> str:
        lines = [
            f"late work: {len(self.warmed)} warmed up ({self.compiles} compiles), "
            f"{len(self.left)} left"
        ]
        lines += [f"left: {work}: {remedy}" for work, remedy in self.left]
        return "\n".join(lines)


def warm_up_late(path: str | PathLike[str], *compiled: Callable[..., Any]) -> LateReport:
    """Repeat the calls that compiled late in an earlier run, on tensors of ones or zeros.

    The functions really run, once for each call, in its grad mode and autocast.

    Args:
        path: the file that `no_compile(record=...)` wrote.
        compiled: what `torch.compile` returned, or modules after `module.compile()`. By default
            these are looked for among the globals of the modules in which the functions are
            defined; nothing is imported.

    Raises:
        LateFileError: the file is malformed.
        OSError: it cannot be read.
        TypeError: a callable does not come from `torch.compile`.
        GraphBudgetExceeded: a strict :class:`~graphs.no_compile` is armed.
    """
    return repeat(read_late(path), compiled)


def repeat(late: Sequence[LateWork], compiled: Sequence[Callable[..., Any]] = ()) -> LateReport:
    """Repeat the calls among `late`, as :func:`warm_up_late`."""
    targets = [(_required_code(each), each) for each in compiled]
    warmed: dict[str, LateWork] = {}
    left: dict[str, tuple[LateWork, str]] = {}
    seen: set[str] = set()

    def note(event: CompileEvent) -> None:
        seen.add(LateWork.of(event).key)

    with CompileWatch(note, all_threads=False) as watch:
        for work in late:
            problem = _repeat(work, targets or _globals_of(work))
            if problem:
                left[work.key] = work, problem
            else:
                warmed[work.key] = work
    for key in [key for key in left if key in seen]:
        warmed[key] = left.pop(key)[0]
    return LateReport((*warmed.values(),), (*left.values(),), watch.compiles)


def late_buckets(path: str | PathLike[str], space: BucketSpace, name: str) -> BucketSpace:
    """Add the sizes that a manager captured late in an earlier run to its buckets.

    Args:
        path: the file that `no_compile(record=...)` wrote.
        space: the manager's buckets so far.
        name: of the manager; others' sizes are left out.

    Raises:
        LateFileError: the file is malformed, or the sizes are of other axes.
        OSError: it cannot be read.
    """
    needs = [work.need for work in read_late(path) if work.need and work.name == name]
    for need in needs:
        if need.keys() != {*space.names}:
            raise LateFileError(
                f"{path}: late work of {name} has the axes {', '.join(need)}, expected "
                f"{', '.join(space.names)}: record it again"
            )
    axes = [
        Axis(
            axis.name,
            min(axis.low, *(need[axis.name] for need in needs)),
            max(axis.high, *(need[axis.name] for need in needs)),
        )
        for axis in (space.axes if needs else ())
    ]
    return BucketSpace(axes, [*space, *needs], space.cost) if needs else space


def _repeat(work: LateWork, targets: Sequence[tuple[CodeType | None, Callable[..., Any]]]) -> str:
    """Repeat a call; returns what to do if that is not possible."""
    if work.need:
        return f"capture it: graphs.late_buckets(path, space, {work.name!r})"
    if work.call is None:
        return work.remedy or "run it once in the warmup"
    found = [target for code, target in targets if code is not None and _is_of(work, code)]
    if not found:
        return _NO_TARGET
    try:
        with under_modes_of(work.call):
            args, kwargs = inputs_of_call(work.call)
            for target in found:
                target(*args, **kwargs)
    except GraphBudgetExceeded:
        raise
    except CannotRepeat as error:
        return f"{error}: call it in the warmup with such inputs"
    except Exception as error:  # whatever the function raises of inputs that are ones or zeros
        return f"{clipped(reason_of(error), 200)}: call it in the warmup with real inputs"
    return ""


def _is_of(work: LateWork, code: CodeType) -> bool:
    if work.file and (work.file, work.line) == (code.co_filename, code.co_firstlineno):
        return True
    return bool(work.call) and _function_of(work).rpartition(":")[2] == code.co_qualname


def _function_of(work: LateWork) -> str:
    return str(work.call["function"]) if work.call else ""


def _globals_of(work: LateWork) -> list[tuple[CodeType | None, Callable[..., Any]]]:
    module = sys.modules.get(_function_of(work).rpartition(":")[0])
    values = {id(value): value for value in vars(module).values()} if module else {}
    return [(code_of_compiled(value), value) for value in values.values() if callable(value)]


def _required_code(compiled: object) -> CodeType:
    code = code_of_compiled(compiled)
    if code is None:
        raise TypeError(
            f"expected what torch.compile returned, got a {type(compiled).__name__}: pass the "
            "compiled function or module"
        )
    return code
