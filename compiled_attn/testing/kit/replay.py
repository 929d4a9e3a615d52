"""Captures a call, to replay it with other values in the same buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from compiled_attn.testing.kit.tensors import tensors_in
from compiled_attn.testing.kit.trial import Call, Trial
from graphs import capture
from graphs.backends.cudagraph import CudaGraphBackend
from graphs.backends.inductor import InductorBackend
from graphs.capture.contract import Backend
from graphs.errors import CaptureError, clipped

__all__ = ["same_buffers"]


def same_buffers(
    trial: Trial, call: Call, backend: Backend | None = None
) -> tuple[Callable[[], Any], str]:
    """Returns a function that replays a call, and a note if it could not be captured, else "".

    Captures a CUDA graph of the eager op; on other devices a full graph with Dynamo that runs
    eagerly, which shows stale constants without a compiler.
    """

    def again(_: Tensor) -> Any:
        with torch.no_grad():
            return trial.op(*call.args, **call.kwargs)

    query = call.fields.query
    if backend is None:
        is_cuda = any(each.is_cuda for each in tensors_in(call.inputs))
        backend = CudaGraphBackend() if is_cuda else InductorBackend("traced", "eager")
    how = {"compiler": "eager", "in_place": True} if "in_place" in (backend.options or ()) else {}
    try:
        graph = capture(again, (query,), backend=backend, name="op", **how)
    except CaptureError as error:
        reason = clipped(str(error), 160)
        return lambda: again(query), f"called twice, as it cannot be captured: {reason}"
    return lambda: graph.run(query), ""
