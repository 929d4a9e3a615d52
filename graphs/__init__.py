"""Captured graphs of fixed shapes: compile a callable once per bucket, never while serving.

In short:

    encoder = graphs.bucketed(model, batch=(1, 32), length=(16, 512))
    encoder.warmup(graphs.progress_for(sys.stderr))
    with graphs.no_compile():
        out = encoder(input_ids=ids, attention_mask=mask)  # any size within the ranges

`graphs.WarmupManager` captures buckets and leaves padding to the caller.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

from graphs.lazy import lazy_names

if TYPE_CHECKING:
    from graphs.bucketed.bucketed import bucketed as bucketed
    from graphs.bucketed.wrapped import Bucketed as Bucketed
    from graphs.buckets.file import from_file as from_file
    from graphs.buckets.file import to_file as to_file
    from graphs.buckets.ladders import explicit as explicit
    from graphs.buckets.ladders import exponential as exponential
    from graphs.buckets.ladders import linear as linear
    from graphs.buckets.space import Axis as Axis
    from graphs.buckets.space import Bucket as Bucket
    from graphs.buckets.space import BucketSpace as BucketSpace
    from graphs.capture.capture import CapturedGraph as CapturedGraph
    from graphs.capture.capture import available_backends as available_backends
    from graphs.capture.capture import capture as capture
    from graphs.capture.eager_between import eager_between as eager_between
    from graphs.errors import BucketedError as BucketedError
    from graphs.errors import BucketFileError as BucketFileError
    from graphs.errors import BucketOverflow as BucketOverflow
    from graphs.errors import CaptureError as CaptureError
    from graphs.errors import GraphBudgetExceeded as GraphBudgetExceeded
    from graphs.errors import InputMismatch as InputMismatch
    from graphs.errors import JournalError as JournalError
    from graphs.errors import LateFileError as LateFileError
    from graphs.errors import ModeMismatch as ModeMismatch
    from graphs.errors import StaleGraph as StaleGraph
    from graphs.torch_internals.catalog import torch_features as torch_features
    from graphs.warmup.group import WarmupGroup as WarmupGroup
    from graphs.warmup.manager import WarmupManager as WarmupManager
    from graphs.warmup.progress import progress_for as progress_for
    from graphs.warmup.report import BucketEvent as BucketEvent
    from graphs.warmup.report import BucketResult as BucketResult
    from graphs.warmup.report import WarmupReport as WarmupReport
    from graphs.watch.causes import CompileEvent as CompileEvent
    from graphs.watch.compiles import CompileWatch as CompileWatch
    from graphs.watch.explain import BreakReport as BreakReport
    from graphs.watch.explain import explain as explain
    from graphs.watch.late import LateReport as LateReport
    from graphs.watch.late import late_buckets as late_buckets
    from graphs.watch.late import warm_up_late as warm_up_late
    from graphs.watch.sentinel import no_compile as no_compile
    from graphs.watch.workers import WorkerWatch as WorkerWatch

_MODULES = {
    "bucketed.bucketed": "bucketed",
    "bucketed.wrapped": "Bucketed",
    "buckets.file": "from_file to_file",
    "buckets.ladders": "explicit exponential linear",
    "buckets.space": "Axis Bucket BucketSpace",
    "capture.capture": "CapturedGraph available_backends capture",
    "capture.eager_between": "eager_between",
    "errors": "BucketFileError BucketOverflow BucketedError CaptureError GraphBudgetExceeded "
    "InputMismatch JournalError LateFileError ModeMismatch StaleGraph",
    "torch_internals.catalog": "torch_features",
    "warmup.group": "WarmupGroup",
    "warmup.manager": "WarmupManager",
    "warmup.progress": "progress_for",
    "warmup.report": "BucketEvent BucketResult WarmupReport",
    "watch.compiles": "CompileWatch",
    "watch.causes": "CompileEvent",
    "watch.explain": "BreakReport explain",
    "watch.late": "LateReport late_buckets warm_up_late",
    "watch.sentinel": "no_compile",
    "watch.workers": "WorkerWatch",
}
if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)
__all__ = sorted(" ".join(_MODULES.values()).split())


class _Package(ModuleType):
    def __setattr__(self, name: str, value: object) -> None:
        # Python binds a subpackage to its name, which for `capture` is that of the function.
        if not (name in __all__ and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
