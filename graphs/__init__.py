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

import sys
from types import ModuleType
from typing import TYPE_CHECKING

from graphs.lazy import lazy_names

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
    from graphs.watch.compiles import CompileWatch
    from graphs.watch.events import CompileEvent
    from graphs.watch.explain import BreakReport, explain
    from graphs.watch.sentinel import no_compile
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "buckets.axes": "Axis Bucket",
            "buckets.file": "from_file to_file",
            "buckets.ladders": "explicit exponential linear",
            "buckets.space": "BucketSpace",
            "capture.capture": "CapturedGraph available_backends capture",
            "errors": "BucketFileError BucketOverflow CaptureError GraphBudgetExceeded "
            "InputMismatch JournalError ModeMismatch StaleGraph",
            "warmup.group": "WarmupGroup",
            "warmup.manager": "WarmupManager",
            "warmup.progress": "progress_for",
            "warmup.report": "BucketEvent BucketResult WarmupReport",
            "watch.compiles": "CompileWatch",
            "watch.events": "CompileEvent",
            "watch.explain": "BreakReport explain",
            "watch.sentinel": "no_compile",
        },
    )

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


class _Package(ModuleType):
    def __setattr__(self, name: str, value: object) -> None:
        # Python binds a subpackage to its name, which for `capture` is that of the function.
        if not (name in __all__ and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
