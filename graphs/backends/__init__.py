"""Capture backends, one per file; `graphs.capture.contract` is their contract."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from graphs.backends.accelerator import AcceleratorBackend
from graphs.backends.aoti import AotiBackend
from graphs.backends.cudagraph import CudaGraphBackend
from graphs.backends.eager import EagerBackend
from graphs.backends.hpu import HpuBackend
from graphs.backends.inductor import InductorBackend
from graphs.backends.onnx.onnxrt import OnnxrtBackend
from graphs.capture.contract import Backend

__all__ = ["BACKENDS"]

BACKENDS: Mapping[str, Backend] = MappingProxyType(
    {
        backend.name: backend
        for backend in (
            EagerBackend(),
            InductorBackend(),
            InductorBackend(name="aot_eager", compiler="aot_eager"),
            AotiBackend(),
            AcceleratorBackend(),
            CudaGraphBackend(),
            HpuBackend(),
            OnnxrtBackend(),
        )
    }
)
