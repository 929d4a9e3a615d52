"""The contract of an executor: what computes the steps of an engine.

An engine decides what a step computes and what comes of it; an executor has the model, its paged
cache and the captured graphs. One process is one (`LocalExecutor`); others may be a device, or
several ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from compiled_attn.cache.defrag import BlockCopies
from compiled_attn.engine.config import EngineConfig
from compiled_attn.engine.logprobs import ScoredToken
from compiled_attn.engine.scheduler import ScheduledStep
from compiled_attn.engine.sizing import Sizing
from compiled_attn.step import RequestTable
from compiled_attn.step.form import Plan
from graphs import Bucket, BucketEvent, WarmupReport

__all__ = ["COPIES", "Executor", "ExecutorReport", "FittedStep"]


COPIES = 16
"""Pairs of blocks that one graph copies or exchanges."""


class FittedStep(NamedTuple):
    """A step that a captured bucket holds.

    Args:
        parts: what it computes.
        plan: its rows.
        bucket: the captured bucket.
        wanted: sizes that the whole step needs, which the parts do not reach if it was cut.
    """

    parts: ScheduledStep
    plan: Plan
    bucket: Bucket
    wanted: dict[str, int]


@dataclass(frozen=True, slots=True)
class ExecutorReport:
    """What an executor is, and what it had to do without.

    Args:
        backend: of the captured graphs.
        kernel: of attention.
        notes: why it is that kernel.
        fallbacks: graphs that were degraded, and a kernel that could not be built.
        steps: the warmup of the graphs of steps; None before it.
        ranks: processes that compute each step together.
    """

    backend: str
    kernel: str
    notes: Mapping[str, str] = field(default_factory=dict)
    fallbacks: int = 0
    steps: WarmupReport | None = None
    ranks: int = 1


class Executor(Protocol):
    """Computes the steps of one engine."""

    @property
    def config(self) -> EngineConfig:
        """What it was made with: the engine's sizes and policies too."""

    def attach(self) -> None:
        """Notes that an engine serves with it.

        Raises:
            RuntimeError: one does already; two would write the same blocks.
        """

    @property
    def sizing(self) -> Sizing:
        """Context, blocks and buckets; after the warmup the buckets that were captured."""

    @property
    def looks_ahead(self) -> bool:
        """Whether a step may begin before the tokens of the one before are read: it then takes
        those that it lacks (`ScheduledStep.is_ahead`) from that one itself."""

    @property
    def eos(self) -> frozenset[int]:
        """Tokens that end a text of the model."""

    @property
    def copies(self) -> BlockCopies:
        """Copies of blocks of the cache."""

    def warmup(self, progress: Callable[[BucketEvent], None] | None = None) -> WarmupReport:
        """Captures the graphs of steps and copies.

        Raises:
            graphs.CaptureError: no bucket could be captured, or not all of them (strict).
        """

    def check_unchanged(self) -> None:
        """Raises an error unless the model is as it was at the warmup."""

    def fit(self, step: ScheduledStep, table: RequestTable) -> FittedStep:
        """The step, cut until a captured bucket holds it.

        Args:
            step: what the scheduler wants computed.
            table: where the blocks of its sequences lie, by their ids.

        Raises:
            graphs.BucketOverflow: not even a single token of the first request has a bucket.
        """

    def run(self, step: FittedStep) -> Sequence[int | str | ScoredToken]:
        """Computes a step: the token after each part, scored if its request asks, or why there is
        none. They may still be on their way: reading them waits.

        What stands after a part that does not reach the end of its prompt is not looked at, but an
        error there is one of its request.
        """

    def finite_blocks(self, places: NDArray[np.int64]) -> int:
        """How many of the blocks at ``places [n]`` are finite, up to the first that is not."""

    def report(self) -> ExecutorReport:
        """What it is, and what it had to do without."""
