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

from graphs.buckets.ladders import (
    BucketFileError,
    explicit,
    exponential,
    from_file,
    linear,
    to_file,
)
from graphs.buckets.space import Axis, Bucket, BucketOverflow, BucketSpace
from graphs.capture.capture import (
    CapturedGraph,
    CaptureError,
    InputMismatch,
    ModeMismatch,
    StaleGraph,
    available_backends,
    capture,
)
from graphs.warmup.group import WarmupGroup
from graphs.warmup.journal import JournalError
from graphs.warmup.manager import BucketEvent, BucketResult, WarmupManager, WarmupReport
from graphs.warmup.progress import progress_for
from graphs.watch.compiles import CompileEvent, CompileWatch
from graphs.watch.explain import BreakReport, explain
from graphs.watch.sentinel import GraphBudgetExceeded, no_compile

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
