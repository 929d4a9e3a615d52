"""The contract of an executor, which computes the steps of an engine.

The engine schedules requests and delivers their tokens; an executor has the model, its paged
cache and the captured graphs. `LocalExecutor` runs in one process; others may be a device, or
several ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from compiled_attn.cache.defrag import BlockSwap
from compiled_attn.engine.config import EngineConfig
from compiled_attn.engine.logprobs import RowResult
from compiled_attn.engine.scheduler import ScheduledStep
from compiled_attn.engine.sizing import Sizing
from compiled_attn.step import RequestTable
from compiled_attn.step.layout import Plan
from graphs import Bucket, BucketEvent, WarmupReport

__all__ = ["COPIES", "Executor", "ExecutorReport", "PlannedStep"]


COPIES = 16
"""Pairs of blocks that one graph copies."""


class PlannedStep(NamedTuple):
    """A step that fits a captured bucket.

    Args:
        uncut_need: the need of the scheduled step before it was cut.
        started_s: when planning began, on the clock of `time.perf_counter`.
    """

    parts: ScheduledStep
    plan: Plan
    bucket: Bucket
    uncut_need: dict[str, int]
    started_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ExecutorReport:
    """Backend, kernel and why it was chosen, and the report of the step graphs after the warmup.

    Fallbacks are degraded graphs, and a kernel that could not be built.
    """

    backend: str
    kernel: str
    notes: Mapping[str, str] = field(default_factory=dict)
    fallbacks: int = 0
    steps: WarmupReport | None = None
    ranks: int = 1


class Executor(Protocol):
    """Computes the steps of one engine.

    One that has LoRA adapters also has an attribute ``adapters``, their `AdapterPool`.
    """

    @property
    def config(self) -> EngineConfig:
        """The configuration it was made with, which is also the engine's."""

    def attach(self) -> None:
        """Marks it as used by an engine.

        Raises:
            RuntimeError: it already is; two engines would write the same blocks.
        """

    @property
    def sizing(self) -> Sizing:
        """Context, blocks and buckets; after the warmup the buckets that were captured."""

    @property
    def schedules_ahead(self) -> bool:
        """Whether it supports async scheduling: a step launched before the tokens of the previous
        one are read takes missing tokens (`ScheduledStep.is_ahead`) from that one itself."""

    @property
    def eos(self) -> frozenset[int]:
        """End-of-sequence tokens of the model."""

    @property
    def copies(self) -> BlockSwap:
        """Copies blocks of the cache."""

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies recurrent states, ``(source, destination)`` slots one after another; only with
        `Sizing.states`."""

    @property
    def near_of(self) -> NDArray[np.int32]:
        """The near block of each block ``[num_blocks]``, which the pool updates between launches;
        only with `Sizing.near_blocks`."""

    def warmup(self, progress: Callable[[BucketEvent], None] | None = None) -> WarmupReport:
        """Captures the graphs of steps and copies.

        Raises:
            graphs.CaptureError: no bucket could be captured, or not all of them (strict).
        """

    def check_unchanged(self) -> None:
        """Raises an error unless the model is as it was at the warmup."""

    def plan(self, step: ScheduledStep, table: RequestTable) -> PlannedStep:
        """Plans a step, cut until a captured bucket holds it.

        Raises:
            graphs.BucketOverflow: not even a single token of the first request has a bucket.
        """

    def launch(self, step: PlannedStep) -> Sequence[RowResult]:
        """Launches a step and returns its result for each part; reading them may wait for it.

        The token after a part that does not reach the end of its prompt is ignored; an error there
        is one of its request.
        """

    def report(self) -> ExecutorReport:
        """Reports backend, kernel and fallbacks."""
