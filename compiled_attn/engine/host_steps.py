"""The steps of a model in the host's memory: a graph reads what a plan has filled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from compiled_attn.engine.executor import FittedStep
from compiled_attn.engine.logprobs import ScoredToken
from compiled_attn.engine.sampler import sampled
from compiled_attn.hf import PagedCausalLM
from graphs import Bucket, WarmupManager

__all__ = ["HostSteps", "Steps"]


class Steps(Protocol):
    """How the steps of a model get to its graphs, and tokens back.

    Attributes:
        module: what is captured for each bucket.
        options: of its capture.
        others: graphs beside those of the buckets.
    """

    module: nn.Module
    options: Mapping[str, Any]
    others: Sequence[WarmupManager]

    def padding(self, bucket: Bucket) -> Any:
        """Inputs of padding alone, to capture a bucket with."""

    def run(self, graphs: WarmupManager, step: FittedStep) -> Sequence[int | str | ScoredToken]:
        """The token after each part of a step, or why there is none, see `Executor.run`."""


class HostSteps:
    """The steps of a model on the CPU.

    Args:
        model: what computes them.

    Attributes:
        module, options, others: see `Steps`.
    """

    options: Mapping[str, Any] = {}
    others: Sequence[WarmupManager] = ()

    def __init__(self, model: PagedCausalLM) -> None:
        self.module: nn.Module = model
        self.padding = model.form.padding

    def run(self, graphs: WarmupManager, step: FittedStep) -> list[int | str | ScoredToken]:
        """See `Steps`."""
        logits: Tensor = graphs.run(step.bucket, *step.plan.fill(step.bucket))
        return sampled(logits, step.parts, step.plan.rows.logits)
