"""ONNX Runtime as a backend of Dynamo: FX graph, `torch.onnx.export`, a session on torch's memory.

Weights, buffers and caches are inputs of the ONNX model, bound by address at each run, so nothing
is copied. A cache that the graph updates is written in place if that is safe
(:func:`graphs.backends.onnx.session.may_alias`), else copied back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from graphs.backends.inductor import InductorBackend
from graphs.backends.onnx.export import to_onnx
from graphs.backends.onnx.session import OnnxSession
from graphs.capture.contract import Backend, CaptureSpec, Frozen, Job
from graphs.errors import NoOnnx
from graphs.installation import install_command
from graphs.torch_internals.compiling import compile_functional

__all__ = ["OnnxrtBackend", "compiled_attn_ort"]

_NEEDED = ("onnxruntime", "onnx", "onnxscript")


class OnnxrtBackend(Backend):
    """Captures through Dynamo and runs with ONNX Runtime on the CPU; no gradients, no bfloat16."""

    name = "onnxrt"

    def available(self) -> str | None:
        """Needs the packages of extra `ort`."""
        missing = [package for package in _NEEDED if find_spec(package) is None]
        if not missing:
            return None
        return f"{', '.join(missing)} not installed; {install_command('ort')}"

    def capture(self, job: Job) -> Frozen:
        """Compile in the first run, as backend `inductor` does."""
        dynamo = InductorBackend(self.name, compiled_attn_ort)
        spec = CaptureSpec(dynamo, job.name, warm_runs=job.spec.warm_runs)
        return dynamo.capture(replace(job, spec=spec))


def compiled_attn_ort(graph: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
    """Compile a Dynamo graph with ONNX Runtime: ``torch.compile(backend="compiled_attn_ort")``.

    Raises:
        NoOnnx: an operator or dtype that ONNX or its CPU runtime does not have, symbolic sizes,
            tensors of another device, or gradients.
    """
    _refuse_unsupported(example_inputs)
    return compile_functional(graph, example_inputs, _compile)


def _compile(graph: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
    return OnnxSession(to_onnx(graph, example_inputs))


def _refuse_unsupported(inputs: Sequence[Any]) -> None:
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    if devices := {value.device.type for value in tensors} - {"cpu"}:
        raise NoOnnx(
            f"expected tensors of the CPU, got some of {', '.join(sorted(devices))}: "
            "use backend 'inductor' there"
        )
    if torch.is_grad_enabled() and any(value.requires_grad for value in tensors):
        raise NoOnnx("expected no gradients, got an input that needs one: use torch.no_grad()")
