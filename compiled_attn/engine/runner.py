"""From scheduled tokens to logits: build the batch, pick the bucket, run its captured graph."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from compiled_attn.engine.config import EngineConfig
from compiled_attn.engine.scheduler import ScheduledTokens
from compiled_attn.engine.sizing import Sizing
from compiled_attn.hf import PagedCausalLM, cache_for
from compiled_attn.step import BatchBuilder, Request, StepBatch, StepPlan, TableBatch, TablePlan
from graphs import Bucket, BucketOverflow, WarmupManager
from graphs.backends.onednn_linear import for_cpu

__all__ = ["FittedStep", "Runner"]

_log = logging.getLogger(__name__)


class FittedStep(NamedTuple):
    """A step that a captured bucket holds.

    Args:
        parts: what it computes.
        plan: its rows.
        bucket: the captured bucket.
        wanted: sizes that the whole step needs, which the parts do not reach if it was cut.
    """

    parts: list[ScheduledTokens]
    plan: StepPlan | TablePlan
    bucket: Bucket
    wanted: dict[str, int]


class Runner:
    """Owns the paged cache and the captured graphs of a model.

    Args:
        model: a Hugging Face causal LM.
        config: backend and strictness.
        sizing: blocks of the cache, shapes to capture.

    The first step that no bucket holds whole is logged.
    """

    def __init__(self, model: PreTrainedModel, config: EngineConfig, sizing: Sizing) -> None:
        cache = cache_for(model, sizing.num_blocks, sizing.block_size)
        self.sizing = sizing
        self._has_told_cut = False
        self.module = PagedCausalLM(model, cache, is_native=sizing.is_native)
        self.builder = BatchBuilder(sizing.num_blocks, sizing.block_size)
        self.graphs = WarmupManager(
            self.module,
            sizing.buckets,
            self._padding,
            backend=config.backend,
            strict=config.strict,
            workers=config.warmup_workers,
            journal=config.warmup_journal,
            name="step",
            **_backend_options(config.backend_name),
        )

    def fit(
        self, step: list[ScheduledTokens], table: Callable[[int], NDArray[np.int64]]
    ) -> FittedStep:
        """The step, cut until a captured bucket holds it.

        Args:
            step: what the scheduler wants computed.
            table: where the blocks of a sequence lie, by its id.

        Raises:
            BucketOverflow: not even a single token of the first request has a bucket.
        """
        parts, wanted, largest = step, None, None
        while True:
            plan = self._plan([_request(part, table(part.sequence.request_id)) for part in parts])
            wanted = wanted or plan.need
            try:
                bucket = self.graphs.bucket(**plan.need)
            except BucketOverflow as overflow:
                largest = overflow.largest
                parts = _shorter(parts)
                if not parts:
                    raise
            else:
                if parts is not step:
                    self._tell_cut(wanted, largest)
                return FittedStep(parts, plan, bucket, wanted)

    def run(self, plan: StepPlan | TablePlan, bucket: Bucket) -> Tensor:
        """Logits ``[requests, vocab]`` of a planned step: of the last new token of each."""
        inputs: StepBatch | TableBatch
        if isinstance(plan, TablePlan):
            inputs = plan.fill(bucket, self.sizing.table_width)
        else:
            inputs = plan.fill(bucket)
        with torch.no_grad():
            logits: Tensor = self.graphs.run(bucket, *inputs)
        return logits[: int(plan.rows.logits.sum())]

    def _tell_cut(self, wanted: dict[str, int], largest: Bucket | None) -> None:
        if not self._has_told_cut:
            self._has_told_cut = True
            _log.warning(
                "no bucket holds a step that needs %s, so it is cut into smaller ones: the largest "
                "bucket is %s; plan or add larger ones",
                Bucket(**wanted),
                largest,
            )

    def _plan(self, requests: list[Request]) -> StepPlan | TablePlan:
        if self.sizing.is_native:
            return self.builder.plan_tables(requests)
        return self.builder.plan(requests)

    def _padding(self, bucket: Bucket) -> StepBatch | TableBatch:
        if self.sizing.is_native:
            return TableBatch.padding(bucket, self.sizing.table_width)
        return StepBatch.padding(bucket)


def _backend_options(backend: str) -> dict[str, Any]:
    return {"options": for_cpu()} if backend == "inductor" else {}


def _request(part: ScheduledTokens, blocks: NDArray[np.int64]) -> Request:
    sequence = part.sequence
    tokens = sequence.tokens[sequence.computed : sequence.computed + part.count]
    # Logits of every part, sampled or not: they show whether what it computed is finite.
    return Request(tokens, sequence.computed, blocks, num_logits=1)


def _shorter(step: Sequence[ScheduledTokens]) -> list[ScheduledTokens]:
    """The step without its last request, or half of its only request's tokens."""
    if len(step) > 1:
        return list(step[:-1])
    only = step[0]
    return [ScheduledTokens(only.sequence, only.count // 2)] if only.count > 1 else []
