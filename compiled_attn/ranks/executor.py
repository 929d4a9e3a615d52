"""The executor of one rank: the share of a model, whose steps are compared with those of others."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

from transformers import PreTrainedModel

from compiled_attn.engine.config import EngineConfig
from compiled_attn.engine.executor import FittedStep
from compiled_attn.engine.local import LocalExecutor
from compiled_attn.engine.logprobs import ScoredToken
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
        # A time that each rank measures for itself would not end the runs of all alike.
        super().__init__(model, replace(config, backend=backend), timed_runs=1)
        self.ranks = ranks

    def warmup(self, progress: Callable[[BucketEvent], None] | None = None) -> WarmupReport:
        """Captures as `LocalExecutor` does; also raises RankLost, where a rank has ended."""
        with self.ranks.calling():
            return super().warmup(progress)

    def run(self, step: FittedStep) -> SequenceOf[int | str | ScoredToken]:
        """The token after each part, the same on each rank, see `Executor.run`.

        Raises:
            RankLost: a rank has ended.
            RanksDisagree: a rank is about to compute another step (strict).
        """
        if self.config.strict:
            self.ranks.agree(_told(step))
        with self.ranks.calling():
            return super().run(step)


def _told(step: FittedStep) -> list[tuple[str, list[int]]]:
    """All that decides what a step computes, by names that a difference is told by."""
    rows, parts = step.plan.rows, step.parts
    tables = [rows.blocks[at : at + held].tolist() for at, held in zip(rows.base, rows.held)]
    return [
        ("requests", [each.request_id for each in parts.sequences]),
        ("tokens of each request", parts.counts),
        ("positions", rows.positions.tolist()),
        ("token ids", rows.tokens.tolist()),
        ("blocks", [block for table in tables for block in table]),
        ("bucket", [*step.bucket.values()]),
    ]
