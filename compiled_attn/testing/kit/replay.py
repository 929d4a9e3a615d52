"""Captures a call, so that it can be replayed with other numbers in the same buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from compiled_attn.testing.kit.tensors import tensors_in
from compiled_attn.testing.kit.trial import Call, Trial
from graphs import capture
from graphs.backends.inductor import InductorBackend
from graphs.errors import CaptureError, clipped

__all__ = ["same_buffers"]


def same_buffers(trial: Trial, call: Call) -> tuple[Callable[[], Any], str]:
    """Returns a function that replays a call, and why it is not captured, if it is not.

    It is captured as one CUDA graph, or on other devices traced by Dynamo as one full graph, which
    then runs op by op: stale constants show, and no compiler is needed.
    """

    def again() -> Any:
        with torch.no_grad():
            return trial.op(*call.args, **call.kwargs)

    is_cuda = any(each.is_cuda for each in tensors_in(call.inputs))
    backend: Any = "cudagraph" if is_cuda else InductorBackend("traced", "eager")
    try:
        return capture(again, (), backend=backend, name="op").run, ""
    except CaptureError as error:
        reason = clipped(str(error), 160)
    return again, f"not captured, called twice in the same buffers: {reason}"
