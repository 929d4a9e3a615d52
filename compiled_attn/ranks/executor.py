"""The executor of one rank under tensor parallelism, and its backend."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from compiled_attn.engine.config import ConfigError, EngineConfig
from compiled_attn.engine.executor import ExecutorReport, PlannedStep
from compiled_attn.engine.local import LocalExecutor
from compiled_attn.engine.logprobs import RowResult
from compiled_attn.engine.sizing import Sizing
from compiled_attn.ranks.group import Ranks
from compiled_attn.ranks.shard import shard
from graphs import BucketEvent, WarmupReport
from graphs.capture.capture import resolve
from graphs.capture.contract import Backend, Frozen, Job
from graphs.torch_internals.compiling import compiling_after
from graphs.torch_internals.events import at_compile_end

__all__ = ["RankExecutor", "RankZeroFirst"]

_TURNS = itertools.count()  # per process, because marks persist


class RankExecutor(LocalExecutor):
    """Computes the shard of one rank.

    In strict mode all ranks compare each step before they compute it. Rank 0 compiles each graph
    first, and the others then load it from the store or inductor's cache.
    """

    def __init__(self, ranks: Ranks, model: PreTrainedModel, config: EngineConfig) -> None:
        self.ranks = ranks
        if config.max_adapters:
            raise ConfigError(
                f"expected max_adapters 0 on several ranks, got {config.max_adapters}: merge the "
                "adapter into the model"
            )
        backend = RankZeroFirst(resolve(config.backend, "step"), ranks)
        config = replace(config, backend=backend)
        # With times measured per rank the ranks would stop their timed runs at different counts.
        super().__init__(model, config, timed_runs=1)

    @classmethod
    def divide(cls, model: PreTrainedModel, ranks: Ranks) -> None:
        """Shard the model in place."""
        shard(model, ranks)

    @classmethod
    def pool_ranks(cls, ranks: Ranks) -> int:
        """Number of ranks that the blocks of one pool are spread over."""
        return 1

    def _draft_for(self, model: PreTrainedModel) -> PreTrainedModel | None:
        """Loads the draft model on rank 0, where drafts are made."""
        return super()._draft_for(model) if self.ranks.leads else None

    def _sizing_of(self, model: PreTrainedModel) -> Sizing:
        """Sizes the cache as that of the rank with the least memory."""
        among = self.pool_ranks(self.ranks)
        sizing = Sizing.of(model, self.config, self.kernel.layout, among, self.draft)
        if self.config.num_blocks is not None:
            return sizing
        own = self.ranks.minimum(1 + (sizing.num_blocks - 1) // among)
        near = self.ranks.minimum(sizing.near_blocks or 0)
        self.config = replace(self.config, num_blocks=own, kv_memory=None)
        return Sizing.of(model, self.config, self.kernel.layout, among, self.draft, most_near=near)

    def warmup(self, progress: Callable[[BucketEvent], None] | None = None) -> WarmupReport:
        """See `LocalExecutor.warmup`; also raises RankLost if a rank exited."""
        with self.ranks.guard():
            return super().warmup(progress)

    def report(self) -> ExecutorReport:
        """See `Executor.report`."""
        return replace(super().report(), ranks=self.ranks.count)

    def launch(self, step: PlannedStep) -> Sequence[RowResult]:
        """Launch a step, see `Executor.launch`; the results are the same on each rank."""
        if self.config.strict:
            self.ranks.compare(_facts(step))
        with self.ranks.guard():
            return super().launch(step)


def _facts(step: PlannedStep) -> dict[str, NDArray[np.int64]]:
    """Facts that define a step, by name.

    The slots of new tokens stand for the blocks: each block of a request was once new or is found
    by its tokens, and only the pool moves blocks.
    """
    rows, parts = step.plan.rows, step.parts
    return {
        "requests": np.array([each.request_id for each in parts.sequences]),
        "counts of tokens": np.array(parts.counts),
        "positions": rows.positions,
        "token ids": rows.tokens,
        "slots": rows.slots,
        "counts of blocks": rows.held,
        "bucket sizes": np.array([*step.bucket.values()]),
    }


class RankZeroFirst(Backend):
    """Wraps a backend so that rank 0 compiles each graph before the other ranks do.

    A graph contains collectives, so all ranks run it during capture and none can finish before the
    others. Only the compile waits, not the trace before it: the other ranks compile after rank 0,
    from inductor's cache.

    Attributes:
        alone: the backend, for graphs of one rank.
    """

    def __init__(self, backend: Backend, ranks: Ranks) -> None:
        self.name, self.options = backend.name, backend.options
        self.alone, self._ranks = backend, ranks

    def available(self) -> str | None:
        """See `Backend`."""
        return self.alone.available()

    def warming_up(self) -> AbstractContextManager[object]:
        """See `Backend`."""
        return self.alone.warming_up()

    def capture(self, job: Job) -> Frozen:
        """Capture; the other ranks compile after rank 0."""
        turn = f"compiled {next(_TURNS)}"
        if not self._ranks.leads:
            with compiling_after(lambda: self._ranks.wait(turn)):
                return self.alone.capture(job)
        try:
            if self.alone.has(job):
                self._ranks.mark(turn)
            with at_compile_end(lambda: self._ranks.mark(turn)):
                return self.alone.capture(job)
        finally:
            self._ranks.mark(turn)

    def has(self, job: Job) -> bool:
        """See `Backend`."""
        return self.alone.has(job)

    def why_no_symbolic(self) -> str:
        """See `Backend`."""
        return self.alone.why_no_symbolic()
