"""The executor of one rank: the share of a model, whose steps are compared with those of others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from compiled_attn.engine.config import EngineConfig
from compiled_attn.engine.executor import ExecutorReport, PlannedStep
from compiled_attn.engine.local import LocalExecutor
from compiled_attn.engine.logprobs import RowResult
from compiled_attn.ranks.group import Ranks
from compiled_attn.ranks.turns import InTurn
from graphs import BucketEvent, WarmupReport
from graphs.capture.capture import resolve

__all__ = ["RankExecutor"]


class RankExecutor(LocalExecutor):
    """Computes the share of one rank.

    In strict mode all ranks compare each step before they compute it. Rank 0 compiles each graph
    first, and the others then find it in the store or in inductor's cache.

    Args:
        ranks: who takes part.
        model: cut by `shard`.
        config: the same on each rank.

    Raises:
        ConfigError, graphs.CaptureError, ValueError: see `LocalExecutor`.
    """

    def __init__(self, ranks: Ranks, model: PreTrainedModel, config: EngineConfig) -> None:
        backend = InTurn(resolve(config.backend, "step"), ranks)
        config = replace(config, backend=backend)
        # A time that each rank measures for itself would end their runs at different moments.
        super().__init__(model, config, timed_runs=1)
        self.ranks = ranks

    def warmup(self, progress: Callable[[BucketEvent], None] | None = None) -> WarmupReport:
        """Captures as `LocalExecutor` does; also raises RankLost, where a rank has ended."""
        with self.ranks.calling():
            return super().warmup(progress)

    def finite_blocks(self, blocks: NDArray[np.int64]) -> int:
        """See `Executor.finite_blocks`; as few as on the rank that has the fewest."""
        return self.ranks.least(super().finite_blocks(blocks))

    def report(self) -> ExecutorReport:
        """See `Executor.report`."""
        return replace(super().report(), ranks=self.ranks.count)

    def launch(self, step: PlannedStep) -> Sequence[RowResult]:
        """Launches a step, see `Executor.launch`; the results are the same on each rank.

        Raises:
            RankLost: a rank has ended.
            RanksDisagree: a rank is about to compute another step (strict).
        """
        if self.config.strict:
            self.ranks.agree(_told(step))
        with self.ranks.calling():
            return super().launch(step)


def _told(step: PlannedStep) -> dict[str, NDArray[np.int64]]:
    """What decides a step, by names that a difference is told by.

    Where new tokens are written stands for the blocks: all of a request's were once new, or are
    found by tokens, and what moves them is the pool alone.
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
