"""Tensor parallelism: one model on several ranks under torchrun."""

from compiled_attn.ranks.engine import RankEngine, engine_on
from compiled_attn.ranks.executor import RankExecutor
from compiled_attn.ranks.group import Ranks, join_ranks
from compiled_attn.ranks.shard import shard

__all__ = ["RankEngine", "RankExecutor", "Ranks", "engine_on", "join_ranks", "shard"]
