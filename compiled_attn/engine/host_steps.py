"""Runs the steps of a model on the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from compiled_attn.engine.executor import PlannedStep
from compiled_attn.engine.logprobs import RowResult
from compiled_attn.engine.speculation.verify import sampled
from graphs import WarmupManager

if TYPE_CHECKING:
    from compiled_attn.models.adapters import AdapterPool
    from compiled_attn.models.hf import PagedCausalLM

__all__ = ["HostSteps"]


class HostSteps:
    """Runs the steps of a model on the CPU, as `DeviceSteps` does on a device."""

    options: Mapping[str, Any] = {}
    others: Sequence[WarmupManager] = ()

    def __init__(self, model: PagedCausalLM, adapters: AdapterPool | None = None) -> None:
        self.module: nn.Module = model
        self._adapters = adapters
        self.padding = model.layout.padding

    def launch(self, graphs: WarmupManager, step: PlannedStep) -> list[RowResult]:
        """See `DeviceSteps.launch`."""
        if self._adapters is not None:
            self._adapters.use([each.adapter for each in step.parts.sequences], step.parts.counts)
        logits: Tensor = graphs.run(step.bucket, *step.plan.fill(step.bucket))
        return sampled(logits, step.parts, step.plan.rows.logits)
