"""Intel Gaudi: HPU graphs in lazy mode, `torch.compile(backend="hpu_backend")` in eager mode.

Tested only against a stub of `habana_frameworks`, never on a device. An in-place write through a
view is lost in an HPU graph, so caches have to be tensors of their own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

from torch import nn

from graphs.backends.inductor import InductorBackend
from graphs.capture.contract import Backend, CaptureSpec, Frozen, Job
from graphs.capture.eager_between import Refusal, cut_by
from graphs.capture.input_overlaps import named_tensors, watch_writes
from graphs.capture.inputs import Input
from graphs.errors import CaptureError
from graphs.watch.causes import describe_failure
from graphs.watch.compiles import note_replay

__all__ = ["HpuBackend"]

_BRIDGE = "habana_frameworks"


class HpuBackend(Backend):
    """Captures with what the Gaudi bridge has for the mode that it runs in.

    Option: `mode`: `lazy` (HPU graphs), `eager` (`hpu_backend`), or `auto`: the bridge's mode.
    """

    name = "hpu"
    device = "hpu"
    options = MappingProxyType({"mode": "auto"})

    def available(self) -> str | None:
        """Needs Intel's bridge and a device."""
        if find_spec(_BRIDGE) is None:
            return f"{_BRIDGE} is not installed; it comes with the Intel Gaudi software"
        try:
            has_device = _bridge().hpu.is_available()
        except Exception as error:
            return f"{_BRIDGE} does not import: {describe_failure(error)}"
        return None if has_device else f"{_BRIDGE} sees no HPU device"

    def capture(self, job: Job) -> Frozen:
        """Run `warm_runs` times; the first run records or compiles."""
        mode = job.options["mode"]
        if mode == "auto":
            is_lazy = importlib.import_module(f"{_BRIDGE}.torch.utils.internal").is_lazy()
            mode = "lazy" if is_lazy else "eager"
        written_since = watch_writes(
            (name, tensor)
            for name, tensor in named_tensors(job.function, job.examples)
            if tensor._is_view() and not tensor.is_inference()
        )
        if mode == "lazy":
            frozen = _record(job)
        else:
            compiled = InductorBackend(self.name, "hpu_backend")
            spec = CaptureSpec(compiled, job.name, warm_runs=job.spec.warm_runs)
            frozen = compiled.capture(replace(job, spec=spec))
        if written := ", ".join(sorted(written_since())):
            raise CaptureError(
                job.name,
                f"{written} is a view and is written in place, which an HPU graph loses: "
                "keep it as a tensor of its own",
            )
        return frozen


def _record(job: Job) -> Frozen:
    bridge = _bridge()
    module = _Own(job.function)
    mark_step = bridge.core.mark_step

    def run(*inputs: Input) -> Any:
        # Before, to keep copies of inputs out of the graph; after, to start it now.
        mark_step()
        result = recorded(*inputs)
        mark_step()
        note_replay()
        return result

    try:
        # The tensor cache would keep the inputs of the recording alive, old KV caches included.
        recorded = bridge.hpu.wrap_in_hpu_graph(module, disable_tensor_cache=True)
    except Exception as error:
        raise CaptureError(job.name, describe_failure(error)) from error
    with cut_by(Refusal("an HPU graph is one recording")):
        return job.warm_up(Frozen(run))


class _Own(nn.Module):
    """A module for one graph: the bridge stores its recording in the module that it wraps."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Input) -> Any:
        return self.function(*inputs)


def _bridge() -> Any:
    return importlib.import_module(f"{_BRIDGE}.torch")
