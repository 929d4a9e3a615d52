"""One model on several ranks: tensor parallelism under torchrun."""

from compiled_attn.ranks.agree import engine_on
from compiled_attn.ranks.engine import RankEngine
from compiled_attn.ranks.executor import RankExecutor
from compiled_attn.ranks.group import Ranks, joined_ranks
from compiled_attn.ranks.shard import shard

__all__ = ["RankEngine", "RankExecutor", "Ranks", "engine_on", "joined_ranks", "shard"]
