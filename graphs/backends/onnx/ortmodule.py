"""torch-ort's `ORTModule`, where it still imports; `onnxrt` is the backend to use elsewhere."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from graphs.capture.contract import Backend, Frozen, Job
from graphs.capture.wrappers import as_module, writes_seen
from graphs.errors import CaptureError
from graphs.watch.causes import describe_failure

__all__ = ["OrtModuleBackend"]


class OrtModuleBackend(Backend):
    """Runs a module through ``torch_ort.ORTModule``, which traces it at its first run."""

    name = "ortmodule"

    def available(self) -> str | None:
        """Needs a torch-ort that imports with this torch; version 1.19.2 does not with 2.13."""
        try:
            _ort_module()
            return None
        except Exception as error:
            return f"{_why_not(error)}; use backend 'onnxrt'"

    def capture(self, job: Job) -> Frozen:
        """Run eagerly once, to see that nothing changes in place, then through ORTModule."""
        module = as_module(job.function)
        tensors = [(f"input {i}", x) for i, x in enumerate(job.examples) if isinstance(x, Tensor)]
        changed = writes_seen([*module.named_buffers(), *tensors])
        Frozen(module).warmed(job.examples, job.name, 1)
        if names := changed():
            raise CaptureError(
                job.name, f"changes {names} in place, which ORTModule loses; use 'onnxrt'"
            )
        try:
            converted = _ort_module()(module)
        except Exception as error:
            raise CaptureError(job.name, describe_failure(error)) from error
        return job.warmed(Frozen(converted))


def _ort_module() -> Any:
    return importlib.import_module("torch_ort").ORTModule


def _why_not(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name == "torch_ort":
        return "torch-ort is not installed"
    text = str(error).strip().splitlines()
    return (
        f"torch-ort does not import with torch {torch.__version__} "
        f"({type(error).__name__}: {text[0] if text else ''})"
    )
