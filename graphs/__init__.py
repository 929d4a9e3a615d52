"""Fixed shapes and captured graphs: freeze a callable at a set of buckets, never compile again.

In short:

    space = graphs.linear(tokens=(1, 32, 256))
    manager = graphs.WarmupManager(module, space, make_inputs)
    manager.warmup(graphs.progress_for(sys.stderr))
    with graphs.no_compile():
        bucket = manager.bucket(tokens=37)
        result = manager.run(bucket, *padded_inputs(bucket))
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphs.buckets.axes import Axis, Bucket
    from graphs.buckets.file import from_file, to_file
    from graphs.buckets.ladders import explicit, exponential, linear
    from graphs.buckets.space import BucketSpace
    from graphs.capture.capture import CapturedGraph, available_backends, capture
    from graphs.errors import (
        BucketFileError,
        BucketOverflow,
        CaptureError,
        GraphBudgetExceeded,
        InputMismatch,
        JournalError,
        ModeMismatch,
        StaleGraph,
    )
    from graphs.warmup.group import WarmupGroup
    from graphs.warmup.manager import WarmupManager
    from graphs.warmup.progress import progress_for
    from graphs.warmup.report import BucketEvent, BucketResult, WarmupReport
    from graphs.watch.compiles import CompileEvent, CompileWatch
    from graphs.watch.explain import BreakReport, explain
    from graphs.watch.sentinel import no_compile

__all__ = [
    "Axis",
    "BreakReport",
    "Bucket",
    "BucketEvent",
    "BucketFileError",
    "BucketOverflow",
    "BucketResult",
    "BucketSpace",
    "CaptureError",
    "CapturedGraph",
    "CompileEvent",
    "CompileWatch",
    "GraphBudgetExceeded",
    "InputMismatch",
    "JournalError",
    "ModeMismatch",
    "StaleGraph",
    "WarmupGroup",
    "WarmupManager",
    "WarmupReport",
    "available_backends",
    "capture",
    "explain",
    "explicit",
    "exponential",
    "from_file",
    "linear",
    "no_compile",
    "progress_for",
    "to_file",
]

_MODULES = {
    "graphs.buckets.axes": "Axis Bucket",
    "graphs.buckets.file": "from_file to_file",
    "graphs.buckets.ladders": "explicit exponential linear",
    "graphs.buckets.space": "BucketSpace",
    "graphs.capture.capture": "CapturedGraph available_backends capture",
    "graphs.errors": "BucketFileError BucketOverflow CaptureError GraphBudgetExceeded "
    "InputMismatch JournalError ModeMismatch StaleGraph",
    "graphs.warmup.group": "WarmupGroup",
    "graphs.warmup.manager": "WarmupManager",
    "graphs.warmup.progress": "progress_for",
    "graphs.warmup.report": "BucketEvent BucketResult WarmupReport",
    "graphs.watch.compiles": "CompileEvent CompileWatch",
    "graphs.watch.explain": "BreakReport explain",
    "graphs.watch.sentinel": "no_compile",
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    # Imported when it is first asked for: torch takes seconds, which no command's help should.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    def __setattr__(self, name: str, value: object) -> None:
        # Python binds a subpackage to its name, which for `capture` is that of the function.
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
